"""What every test may use: the interpreter tests and the pools of ranks. The machinery is in tests/support."""

import pytest


def pytest_configure(config):
    config.pluginmanager.import_plugin("interpreter_tests")


@pytest.fixture(scope="session")
def ranks():
    """One pool of gloo processes for the whole session: `ranks.run(world_size, function, *args)`.

    Returns the list of the ranks' return values. See `rank_pool.RankPool`.
    """
    from rank_pool import RankPool

    with RankPool() as pool:
        yield pool


@pytest.fixture
def fresh_ranks():
    """A pool of this test alone, for cases in which a process is killed or left in a state of its own."""
    from rank_pool import RankPool

    with RankPool() as pool:
        yield pool
