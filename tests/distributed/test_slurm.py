"""What Slurm's variables mean."""

import pytest

from automodel.distributed.slurm import derive_port, expand_nodelist, tasks_on_node


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("node7", ["node7"]),
        ("b,a", ["b", "a"]),
        ("node[009-011]", ["node009", "node010", "node011"]),
        ("node[7,1-2]-ib,login", ["node7-ib", "node1-ib", "node2-ib", "login"]),
        ("rack[1-2]n[3,5]", ["rack1n3", "rack1n5", "rack2n3", "rack2n5"]),
    ],
)
def test_lists_of_nodes(text, hosts):
    assert expand_nodelist(text) == hosts


@pytest.mark.parametrize("text", ["node[1-2", "node1]", "node[1-x]", "node[]", "node[1,[2]]"])
def test_a_list_of_nodes_that_is_none(text):
    with pytest.raises(ValueError, match="the list of nodes"):
        expand_nodelist(text)


@pytest.mark.parametrize(
    ("text", "node", "tasks"), [("4", 0, 4), ("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("4(x2),3", 3, None), ("", 0, None)]
)
def test_tasks_of_a_node(text, node, tasks):
    assert tasks_on_node(text, node=node) == tasks


@pytest.mark.parametrize("text", ["four", "4(x)", "4(2)"])
def test_tasks_that_are_none(text):
    with pytest.raises(ValueError, match="must be like"):
        tasks_on_node(text, node=0)


def test_ports_follow_from_the_job_and_differ_between_neighbours():
    ports = {derive_port(job, step=step) for job in range(100, 105) for step in range(2)}
    assert len(ports) == 10
    assert all(1024 < port < 32768 for port in ports)
    assert 1024 < derive_port(987_654_321, step=4) < 32768
