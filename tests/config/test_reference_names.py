import pytest

from automodel.config.reference_names import translate_name


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("nemo_automodel.NeMoAutoConfig.from_pretrained", "automodel.NeMoAutoConfig.from_pretrained"),
        ("nemo_automodel.components.training.rng.StatefulRNG", "automodel.training.rng.StatefulRNG"),
        ("nemo_automodel.components._peft.lora.PeftConfig", "automodel.peft.lora.PeftConfig"),
        ("nemo_automodel.components.datasets.llm.squad.make_squad_dataset", "automodel.data.squad.make_squad_dataset"),
        ("nemo_automodel.components.datasets.utils.default_collater", "automodel.data.collate.default_collater"),
        ("nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy", "automodel.training.loss.MaskedCrossEntropy"),
        ("nemo_automodel.components.loss.kd_loss.KDLoss", "automodel.training.loss.kd_loss.KDLoss"),
        ("nemo_automodel", "automodel"),
        ("nemo_automodels.x", None),
        ("torch.optim.AdamW", None),
        ("", None),
    ],
)
def test_names_of_the_reference_system_and_ours(theirs, ours):
    assert translate_name(theirs) == ours
