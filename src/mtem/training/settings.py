"""The settings that all methods share."""

from __future__ import annotations

import dataclasses
from typing import Any

from mtem import schedules
from mtem.models.augment import KINDS
from mtem.selection import priors
from mtem.selection.criteria import CRITERIA, DEFAULT_CRITERION, LAST
from mtem.settings import setting

AVERAGES = 10  # the average of the weights is over that part of the run at most
SCHEDULE_NAMES = (*schedules.SCHEDULES, "assumption-2")


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """Lengths, learning rates, batches, the device, the choice of the final weights.

    Defaults that depend on the device are None until `mtem.run.defaults` has filled them in.
    """

    seed: int = setting(0, "seed of every random choice", low=0, high=2**32 - 1)
    max_length: int | None = setting(None, "tokens kept of a text; none: 512 on a GPU, 256 on a CPU; bigcn 256", low=4)
    batch_size: int = setting(50, "texts in a batch, of the source and of the target", low=1)
    pretrain_epochs: float | None = setting(
        None, "passes over all texts, labeled or not, in which the encoder learns to restore masked words, before the source "
        "training; none: 24 on a GPU for encoders with hidden states narrower than 512 of which all layers are trained, else 0",
        low=0.0,
    )  # fmt: skip
    pretrain_learning_rate: float | None = setting(
        None, "learning rate of the pretraining; none: 2e-4 for encoders with hidden states narrower than 512, else 1e-4", low=0.0
    )
    pretrain_batch_size: int = setting(64, "texts in a batch of the pretraining", low=1)
    source_epochs: float = setting(3.0, "passes over the labeled texts before the adaptation", low=0.0)
    source_learning_rate: float | None = setting(
        None,
        "learning rate of the source training; none: 5e-5, or 5e-4 when lower layers are frozen; bigcn 2e-3, "
        "with features=encoder 5e-4",
        low=0.0,
    )
    epochs: float | None = setting(
        None, "passes over the unlabeled texts in the adaptation; none: 12 on a GPU, 2 on a CPU; bigcn 24", low=0.0
    )
    steps: int | None = setting(None, "steps of the adaptation, instead of epochs", low=0)
    stop_epochs: float | None = setting(
        None, "passes after which the adaptation stops, on the schedule of all epochs; a rehearsal sets it; none: at the end",
        low=0.0,
    )  # fmt: skip
    learning_rate: float | None = setting(
        None,
        "learning rate of the adaptation; none: 5e-5 on a GPU, 2e-5 on a CPU, 2e-4 when lower layers are frozen; bigcn 5e-4",
        low=0.0,
    )
    ema_decay: float = setting(
        0.99,
        "decay of the moving average of the weights in the adaptation, which gives the pseudo labels and is saved in the end; "
        "smaller in runs of less than 1,000 steps, so that the average is over a tenth of the run at most; 0: no average",
        low=0.0,
        high=0.9999,
    )
    view: str | None = setting(
        None,
        "view of the unlabeled texts in which pseudo labels are learned (mtem, fixmatch, cst): mask, delete or swap words, or "
        "one third of each (mixed); dropout: the texts themselves; none: mixed, or mask when lower layers are frozen, which "
        "would have to read deleted and swapped words again",
        choices=KINDS,
    )
    view_strength: float | None = setting(
        None, "share of the words (mask: of the tokens) that the view changes; none: 0.3, with mask 0.15", low=0.0, high=1.0
    )
    view_radius: float | None = setting(
        None,
        "norm of a perturbation of the view's embeddings, relative to theirs, in the direction that speaks most against the "
        "pseudo label (mtem, fixmatch, cst); none: 0.005 on a GPU if all layers are trained, which takes about a fifth longer; "
        "bigcn with features=encoder 0.2 where no class shares are assumed and no thread of the target is labeled, with the "
        "recommended preset; else 0, no perturbation",
        low=0.0,
        high=1.0,
    )
    optimizer: str = setting(
        "adamw", "optimizer of the adaptation; sgd, as in Algorithm 1, hardly moves a transformer at the usual learning rates",
        choices=("adamw", "adam", "sgd"),
    )  # fmt: skip
    schedule: str = setting("linear", "learning rate schedule", choices=SCHEDULE_NAMES)
    warmup_ratio: float = setting(0.1, "share of the steps in which the learning rate rises", low=0.0, high=1.0)
    weight_decay: float = setting(0.01, "weight decay of matrices; biases and norms have none", low=0.0)
    layer_decay: float = setting(1.0, "learning rate of each layer relative to the one above it", low=0.01, high=1.0)
    max_grad_norm: float = setting(1.0, "largest norm of the gradient; 0: no clipping", low=0.0)
    frozen_layers: int | None = setting(
        None, "number of lower layers that are not trained (negative: all but so many); none: 0 on a GPU, all but two on a CPU"
    )
    target_labeled_share: float | None = setting(
        0.5,
        "with --target-labeled: share of the labeled target texts in every labeled batch, for every method and for the outer "
        "loop; none: their share of all labeled texts",
        low=0.01,
        high=1.0,
    )
    class_weights: str = setting(
        "none", "weights of the classes in the loss on labeled texts; balanced: rare classes count as much as frequent ones",
        choices=("none", "balanced"),
    )  # fmt: skip
    target_class_prior: str = setting(
        "none",
        "class shares assumed of the target: pseudo labels are aligned with them, and at the end each class gets the bias that "
        "brings the predictions to these shares. labeled: those of the labeled target texts. auto: these with 30 labels of even "
        "shares added; without such texts nothing (bigcn on words: uniform). estimated: from the unlabeled texts, if only the "
        "shares differ from the source's",
        choices=priors.KINDS,
    )
    balance_target: bool = setting(
        False,
        "draw the unlabeled texts so that all classes that the source model predicts come equally often; for a target in which "
        "one class is rare, and matters as much as the others",
    )
    validation_share: float = setting(0.1, "share of the labeled texts held out", low=0.01, high=0.5)
    outer_share: float = setting(
        0.0,
        "share of the labeled source texts that no weight is trained on, and against which mtem learns its indexes; the other "
        "methods train on fewer texts; 0: the labeled batch of the step, as in the paper",
        low=0.0,
        high=0.5,
    )
    criterion: str = setting(DEFAULT_CRITERION, "how weights are chosen without target labels", choices=(*CRITERIA, LAST))
    evaluations: int = setting(8, "how often weights are evaluated during the adaptation", low=1)
    evaluation_texts: int = setting(1000, "target texts, and at most as many held-out texts, in each evaluation", low=10)
    left_out_models: int = setting(
        4,
        "additional source models, each trained without one source domain (the largest ones) or without a part of the labeled "
        "target texts, to measure how far the accuracy estimate is off in an unseen domain; 0: none",
        low=0,
    )
    calibrate: bool = setting(
        True,
        "divide the final model's logits by the temperature that fits the held-out source texts best: its confidence changes, "
        "its labels do not; false: the head stays as trained",
    )
    device: str = setting("auto", "cpu, cuda, mps or auto")
    precision: str = setting(
        "auto", "auto: bf16 on a GPU that has it, and in the training steps of an encoder on a CPU that has it, else fp32",
        choices=("auto", "fp32", "bf16", "fp16"),
    )  # fmt: skip
    attention: str | None = setting(None, "attention implementation of transformers; none: its default")
    cuda_graphs: bool = setting(
        True, "on a GPU, capture a step and replay it, which small encoders need; false: launch every operation anew"
    )
    microbatches: int = setting(
        1,
        "parts in which a batch passes through the model; more parts need less memory and more time, with the same results but "
        "for rounding and the draws of dropout; no effect with bigcn",
        low=1,
    )
    activation_checkpointing: bool = setting(
        False, "keep only the inputs of the layers, and compute the rest again in the backward pass: less memory, more time"
    )
    max_skipped_steps: int = setting(
        10, "steps of a stage that may be skipped because their loss or gradient is not finite; one more ends the run", low=0
    )
    log_every: int = setting(10, "steps between two lines of the history", low=1)
    checkpoint_seconds: float = setting(60.0, "time between two checkpoints", low=0.0)

    def teacher_and_view(self, steps: int, *, frozen: bool = False) -> dict[str, Any]:
        """Return what methods find of the recipe in their context.

        Parameters
        ----------
        steps
            The steps of the adaptation. A short one has a shorter average, or none: else it would end near its start.
        frozen
            Whether lower layers are frozen.
        """
        decay = min(self.ema_decay, 1 - AVERAGES / steps) if steps > AVERAGES else 0.0
        view = self.view or ("mask" if frozen else "mixed")
        usual = {"mask": 0.15, "dropout": 0.0}.get(view, 0.3)
        strength = usual if self.view_strength is None else self.view_strength
        return {"ema_decay": decay, "view": view, "view_strength": strength, "view_radius": self.view_radius or 0.0}


def find_learning_rates(settings: TrainingSettings, defaults: tuple[float, float]) -> tuple[float, float]:
    """Return the learning rates (source, adaptation): those of the settings, or the model's defaults."""
    source, adaptation = defaults
    return (
        source if settings.source_learning_rate is None else settings.source_learning_rate,
        adaptation if settings.learning_rate is None else settings.learning_rate,
    )
