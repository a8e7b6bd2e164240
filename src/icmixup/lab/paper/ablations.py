"""The choices that the paper leaves open, and the rivals that it does not try, as tables of the same kind."""

from __future__ import annotations

from icmixup.lab.paper.spec import ABLATED, TAIL10, TAIL100, TENTH, PaperTable, by_name, methods
from icmixup.lab.training.recipe import STRONG, Recipe

STRONG_FIELDS = ("schedule", "nesterov", "rotation")  # what makes a recipe a strong one

ABLATIONS = (
    PaperTable(
        name="lam",
        title="Ablation: one lam for the batch, for each element, or for each pair; ResNet-34",
        rows={"batch": {}, "elem": {"mode": "elem"}, "pair": {"mode": "pair"}},
        columns={
            "Mixup, CIFAR-100 10 %": {"method": "mixup", **TENTH},
            "RegMixup, CIFAR-100 10 %": {"method": "regmixup", **TENTH},
            **ABLATED,
        },
        in_paper=False,
        notes=(
            "batch is the authors' code, and the default here; the paper's text suggests one lam a pair.",
        ),
    ),
    PaperTable(
        name="duplicates",
        title="Ablation: pairs of a batch that share their classifier; ResNet-34",
        rows={"negative": {}, "ignore": {"duplicates": "ignore"}, "positive": {"duplicates": "positive"}},
        columns=ABLATED,
        in_paper=False,
        notes=("negative is the paper's.",),
    ),
    PaperTable(
        name="negatives",
        title="Ablation: the original classes added as negatives of the class axis; ResNet-34",
        rows={"pairs": {}, "pairs and classes": {"negatives": ("pairs", "classes")}},
        columns=ABLATED,
        in_paper=False,
        notes=("pairs is the paper's.",),
    ),
    PaperTable(
        name="joint",
        title="Ablation: RegMixup's clean and mixed images in two forwards, or in one; ResNet-34",
        rows={"two forwards": {}, "one forward": {"joint": True}},
        columns={
            f"{name}, CIFAR-100 10 %": {**change, **TENTH}
            for name, change in methods("RegMixup", "IC-RegMixup").items()
        },
        in_paper=False,
        notes=("Two is what this paper's authors do, one what RegMixup's do.",),
    ),
    PaperTable(
        name="temperature",
        title="Ablation: what mixed scores are divided by",
        rows={"0.5": {"temperature": 0.5}, "1": {}, "2": {"temperature": 2.0}},
        columns={
            "IC-Mixup, CIFAR-100 10 %, paper, ResNet-34": {"method": "ic-mixup", **TENTH},
            "IC-Mixup-CutMix, LT-CIFAR100 0.01, strong, ResNet-32": {
                **{name: getattr(STRONG, name) for name in STRONG_FIELDS},
                **TAIL100,
                "method": "ic-mixup-cutmix",
                "model": "resnet32",
            },
        },
        in_paper=False,
        notes=("The paper has no temperature, which is 1.",),
    ),
    PaperTable(
        name="remix",
        title="Ablation: when the rarer class takes the whole label in Remix, LT-CIFAR100 0.01, ResNet-32",
        rows={
            "kappa 3, tau 0.5": {},
            "kappa 3, tau 1": {"tau": 1.0},
            "kappa 2, tau 0.5": {"kappa": 2.0},
            "kappa 1.2, tau 0.5": {"kappa": 1.2},
            "kappa 3, tau 0.5, a lam each": {"mode": "elem"},
        },
        columns=methods("Remix", "IC-Remix"),
        base=Recipe(model="resnet32", **TAIL100),
        in_paper=False,
        notes=(
            "kappa 3 and tau 0.5 are Remix's own; tau 1 is the paper's sentence to the letter, for which any "
            "lam is small enough; 2 and 1.2 are the kappas of the released code, whose Remix, never called, "
            "draws a lam for each image.",
        ),
    ),
    PaperTable(
        name="centred",
        title="Ours: rows of S~ less their means, the paper's recipe",
        rows=by_name("mixup", "ic-mixup", "ic-mixup-centred"),
        columns={
            "CIFAR-100 10 %, resnet34": TENTH,
            "LT-CIFAR100 0.01, resnet32": {**TAIL100, "model": "resnet32"},
            "LT-CIFAR10 0.01, resnet32": {**TAIL10, "model": "resnet32"},
        },
        gains=(("ic-mixup-centred", "ic-mixup"),),
        in_paper=False,
        notes=("With CutMix and the strong recipe: long-tail.",),
    ),
    PaperTable(
        name="last-batch",
        title="Ablation: an epoch's short last batch kept or dropped, CIFAR-100 10 %, ResNet-34",
        rows={"kept": {}, "dropped": {"drop_last": True}},
        columns=methods("No Mixup", "Mixup", "IC-Mixup"),
        base=Recipe(**TENTH),
        in_paper=False,
        notes=("5,000 images are 39 batches of 128 and one of 8. The released code keeps it, and so do we.",),
    ),
    PaperTable(
        name="long-tail",
        title="Ours: Infinite Class beside logit adjustment (balanced) and class weights (ic-balanced), 0.01",
        rows=by_name(
            *("erm", "balanced", "mixup", "balanced-mixup", "ic-mixup", "ic-balanced-mixup"),
            *("mixup-cutmix", "balanced-mixup-cutmix", "ic-mixup-cutmix", "ic-mixup-cutmix-centred"),
            "ic-balanced-mixup-cutmix",
        ),
        columns={
            "LT-CIFAR100, strong, resnet18": {**TAIL100, "model": "resnet18"},
            "LT-CIFAR100, strong, resnet32": {**TAIL100, "model": "resnet32"},
            **{
                f"{data}, paper, {model}": {
                    **tail,
                    **{name: getattr(Recipe(), name) for name in STRONG_FIELDS},
                    "model": model,
                }
                for data, tail in (("LT-CIFAR100", TAIL100), ("LT-CIFAR10", TAIL10))
                for model in ("resnet32", "resnet34")
            },
        },
        base=STRONG,
        gains=(
            ("ic-mixup", "balanced-mixup"),
            ("ic-balanced-mixup", "balanced-mixup"),
            ("ic-mixup-cutmix", "balanced-mixup-cutmix"),
            ("ic-mixup-cutmix-centred", "balanced-mixup-cutmix"),
            ("ic-balanced-mixup-cutmix", "balanced-mixup-cutmix"),
        ),
        in_paper=False,
        notes=(
            "strong is --recipe strong: half a cosine, Nesterov, crop and flip; paper is the paper's recipe.",
        ),
    ),
)
