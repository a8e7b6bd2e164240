"""The mutants of tools/mutate.py: small plausible bugs, each one exact replacement."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    module: str  # below icmixup, such as contrast.plain
    name: str
    old: str  # occurs exactly once in it
    new: str


PAIRS = [
    (
        "lam and 1 - lam exchanged in mix_inputs",
        "torch.lerp(images[pairs.partner], images, weight)",
        "torch.lerp(images, images[pairs.partner], weight)",
    ),
    (
        "lam and 1 - lam exchanged in mix_targets",
        "torch.lerp(shares[pairs.partner], shares, pairs.lam[:, None])",
        "torch.lerp(shares, shares[pairs.partner], pairs.lam[:, None])",
    ),
    (
        "pixels mixed by the label's lam",
        "like_inputs(pairs.weight, images)",
        "like_inputs(pairs.lam, images)",
    ),
    (
        "labels mixed by the pixels' weight",
        "shares, pairs.lam[:, None])",
        "shares, pairs.weight.flatten(1).mean(1, True))",
    ),
    ("weight not checked against the images", "    check_fits(weight, images)\n", ""),
    ("label smoothing dropped", "if not label_smoothing:", "if True:"),
    (
        "smoothing over C - 1 classes",
        "label_smoothing / shares.shape[1]",
        "label_smoothing / (shares.shape[1] - 1)",
    ),
    (
        "accuracy of the lowest score",
        "scores.argmax(dim=1, keepdim=True)",
        "scores.argmin(dim=1, keepdim=True)",
    ),
    ("another default alpha", "    alpha: float = 0.2,\n    *,", "    alpha: float = 1.0,\n    *,"),
    ("Gamma(alpha) for Gamma(alpha + 1)", "alpha + 1.0, device=place", "alpha, device=place"),
    ("U for U^(1 / alpha)", "torch.float64).log() / alpha", "torch.float64).log()"),
    ("one gamma in place of two", "log_gamma[0] - log_gamma[1]", "log_gamma[0]"),
    (
        "uniform draws ignore the generator",
        "torch.rand(shape, generator=generator,",
        "torch.rand(shape, generator=None,",
    ),
    (
        "gamma draws ignore the generator",
        "torch._standard_gamma(shape, generator=generator)",
        "torch._standard_gamma(shape)",
    ),
    (
        "everyone is their own partner",
        '    if mode != "pair":\n        return order',
        '    if mode != "pair":\n        return order.sort().values',
    ),
    (
        "partners of pairs gathered, not scattered",
        ".scatter(0, order, order[neighbour])",
        ".copy_(order[neighbour])",
    ),
    (
        "the odd one out meets the first",
        "torch.where(neighbour == len(labels), position, neighbour)",
        "neighbour % len(labels)",
    ),
    (
        "a pair's lam is that of the partner",
        "drawn[torch.minimum(partner, torch.arange(len(partner), device=partner.device))]",
        "drawn[partner]",
    ),
    ("lam of each image in batch mode", '1 if mode == "batch" else len(labels)', "len(labels)"),
    ("one lam for all in elem mode", "    return drawn\n", "    return drawn[:1].expand_as(drawn)\n"),
    ("Remix compares lam with kappa", "& (pairs.lam < tau)", "& (pairs.lam < kappa)"),
    ("Remix compares 1 - lam with kappa", "(1 - pairs.lam < tau)", "(1 - pairs.lam < kappa)"),
    ("Remix: > for >= kappa", "times_commoner >= kappa", "times_commoner > kappa"),
    ("Remix: < for <= 1 / kappa", "times_commoner <= 1 / kappa", "times_commoner < 1 / kappa"),
    ("Remix: <= for < tau", "& (pairs.lam < tau)", "& (pairs.lam <= tau)"),
    ("Remix: <= for < tau, other side", "(1 - pairs.lam < tau)", "(1 - pairs.lam <= tau)"),
    ("Remix: ratio upside down", "size / size[pairs.partner]", "size[pairs.partner] / size"),
    (
        "Remix gives the label to the common class",
        "masked_fill(to_partner, 0.0).masked_fill(to_image, 1.0)",
        "masked_fill(to_partner, 1.0).masked_fill(to_image, 0.0)",
    ),
    (
        "Remix moves pixels, not labels",
        "Pairs(pairs.partner, pairs.weight, lam_y)",
        "Pairs(pairs.partner, lam_y, pairs.lam)",
    ),
    (
        "Remix: top class for the expected size",
        "(labels.float() * counts).sum(dim=1)",
        "counts[labels.argmax(dim=1)]",
    ),
    ("Remix: bytes as a mask", "counts[labels.long()]", "counts[labels]"),
    ("Remix: kappa 2", "kappa: float = 3.0", "kappa: float = 2.0"),
    ("Remix: tau 0.4", "tau: float = 0.5", "tau: float = 0.4"),
    (
        "CutMix lam not read off the mask",
        "Pairs(pairs.partner, weight, weight.flatten(1).mean(dim=1))",
        "Pairs(pairs.partner, weight, pairs.lam)",
    ),
    ("CutMix: square root in every dimension", "** (1 / len(size)) / 2", "** 0.5 / 2"),
    ("CutMix: box of double width", "** (1 / len(size)) / 2", "** (1 / len(size))"),
    ("CutMix: box of share lam", "half = (1 - pairs.lam[:, None])", "half = (pairs.lam[:, None])"),
    ("CutMix: box kept, rest pasted", "weight = 1.0 - inside.to(", "weight = inside.to("),
    ("CutMix: one centre for all dims", "centre[:, dim, None]", "centre[:, 0, None]"),
    (
        "CutMix: pixels at their corners",
        "device=labels.device) + 0.5) / pixels",
        "device=labels.device)) / pixels",
    ),
    ("CutMix: box not shared in a pair", "    centre = spread(centre, pairs.partner, mode)\n", ""),
    ("either: coin turned round", "generator) < switch_prob", "generator) >= switch_prob"),
    (
        "either: lam of the other kind",
        "torch.where(cut, boxes.lam, blend.lam)",
        "torch.where(cut, blend.lam, boxes.lam)",
    ),
    ("either: one alpha for both", "labels, cutmix_alpha, size, mode=mode", "labels, alpha, size, mode=mode"),
    ("either: CutMix with other partners", "partner=blend.partner, lam=lam", "partner=partner, lam=lam"),
    ("either: coin not shared in a pair", "    cut = spread(cut, blend.partner, mode)\n", ""),
    ("virtual: right=True dropped", "where, right=True)", "where)"),
    (
        "virtual: all classes alike",
        "counts.double() / counts.double().sum() * 2**52",
        "torch.ones_like(counts).double() * 2**40",
    ),
    (
        "virtual: one lam for all",
        "draw_beta(alpha, number, counts.device, generator)[:, None]",
        "draw_beta(alpha, 1, counts.device, generator)[:, None]",
    ),
    ("virtual: no class has an image", "    check_some_size(counts)\n", ""),
    ("prob turned round", "generator) >= prob", "generator) < prob"),
    ("unmixed pixels with mixed labels", "weight, torch.where(pure, 1.0, pairs.lam))", "weight, pairs.lam)"),
    (
        "mixed pixels with unmixed labels",
        "Pairs(pairs.partner, weight, torch.where",
        "Pairs(pairs.partner, pairs.weight, torch.where",
    ),
]

CONTRAST_REQUEST = [
    (
        "extra classifiers on the pair axis too",
        "len(self.targets) if self.num_columns is None else self.num_columns",
        "len(self.targets)",
    ),
    ("keys never there", "return self.row_keys, self.column_keys", "return None, None"),
]

CONTRAST_PLAIN = [
    ("S~ transposed once too often", "mixed = scores @ targets.T", "mixed = (scores @ targets.T).T"),
    ("columns not transposed", "matched = columns.T", "matched = columns"),
    ("scores detached", "mixed = scores @ targets.T", "mixed = scores.detach() @ targets.T"),
    ("targets detached", "mixed = scores @ targets.T", "mixed = scores @ targets.detach().T"),
    (
        "columns detached",
        "matched = columns.T",
        "matched = columns.T.detach()",
    ),
    ("S~ halved", "mixed = scores @ targets.T", "mixed = scores @ targets.T / 2"),
    ("bias dropped", "mixed if request.bias is None else mixed + request.bias", "mixed"),
    ('"ignore" and "positive" exchanged', 'if duplicates == "ignore":', 'if duplicates == "positive":'),
    ("duplicates always negative", 'if duplicates == "negative" or same is None:', "if True:"),
    ("the own one ignored too", "same.scatter(1, own[:, None], False)", "same"),
    ("positives are the others", "masked_fill(~same, -torch.inf)", "masked_fill(same, -torch.inf)"),
    ("positives over the other axis", "mixed.log_softmax(dim=1)", "mixed.log_softmax(dim=0)"),
    (
        "mean of the plain product is a sum",
        "F.cross_entropy(mixed, own, reduction=reduction)",
        'F.cross_entropy(mixed, own, reduction="sum" if reduction == "mean" else reduction)',
    ),
    ("keys of all shares alike", "* 43758.5453123) + 2.0", "* 0.0) + 2.0"),
    ("keys depend on memory layout", ".contiguous().sum(dim=1)", ".sum(dim=1)"),
]

LOSS = [
    ("class axis dropped", "rows=options.contrasts_pairs(),", "rows=False,"),
    ("pair axis dropped", 'columns="pair" in axes and ranks.alone(),', "columns=False,"),
    (
        "mean halved, as CLIP's",
        "losses.mean() if share == 1",
        "losses.mean() / 2 if share == 1",
    ),
    ("mean is a sum", "losses.mean() if share == 1", "losses.sum() if share == 1"),
    ("sum is a mean", "return losses.sum()", "return losses.mean()"),
    ("axes averaged, as CLIP's", "else parts[0] + parts[1]", "else (parts[0] + parts[1]) / 2"),
    ("sums and single losses are means", 'mean_inside = reduction == "mean" and', "mean_inside ="),
    ("weights after the mean", "and class_weights is None and", "and"),
    ("temperature multiplies", "else scores / temperature", "else scores * temperature"),
    ("temperature dropped", "else scores / temperature", "else scores"),
    ("scores detached", "= scores.to(dtype), targets", "= scores.to(dtype).detach(), targets"),
    (
        "autocast not left",
        "scores.device.type, enabled=False",
        "scores.device.type, enabled=torch.is_autocast_enabled(scores.device.type)",
    ),
    (
        "float64 cut to float32",
        "dtype = torch.promote_types(torch.promote_types(scores.dtype, targets.dtype), torch.float32)",
        "dtype = torch.float32",
    ),
    (
        "half precision kept",
        "dtype = torch.promote_types(torch.promote_types(scores.dtype, targets.dtype), torch.float32)",
        "dtype = torch.promote_types(scores.dtype, targets.dtype)",
    ),
    ("class weights not normalised", "weights / gather_rows(weights, ranks).mean()", "weights"),
    (
        "class weights on the class axis",
        "pair_losses = pair_losses * pair_weights(",
        "class_losses = class_losses * pair_weights(",
    ),
    (
        "virtual bias of the other sign",
        "-math.log(len(virtual) / len(targets))",
        "math.log(len(virtual) / len(targets))",
    ),
    ("virtual bias dropped", "-math.log(len(virtual) / len(targets))", "0.0"),
    (
        "original classes always there",
        'add_classifiers(classifiers, "classes" in negatives, virtual)',
        "add_classifiers(classifiers, True, virtual)",
    ),
    (
        "original classes never there",
        'add_classifiers(classifiers, "classes" in negatives, virtual)',
        "add_classifiers(classifiers, False, virtual)",
    ),
    (
        "virtual pairs never there",
        'add_classifiers(classifiers, "classes" in negatives, virtual)',
        'add_classifiers(classifiers, "classes" in negatives, None)',
    ),
    ("sources and classes exchanged", 'if negatives == ("sources",):', 'if negatives == ("classes",):'),
    ("a pure pair has two sources", ".masked_fill(alone, -torch.inf)", ""),
    ("one source", "targets.topk(min(2, targets.shape[1]), dim=1)", "targets.topk(1, dim=1)"),
    ("any source is a duplicate", "same = share == 1", "same = share > 0"),
    ("any class of the pair is a duplicate", "same = targets == 1", "same = targets > 0"),
    (
        "own classifier is the top class",
        "own = (scores * targets).sum(dim=1, keepdim=True)",
        "own = (scores * targets).amax(dim=1, keepdim=True)",
    ),
    (
        "duplicates forgotten",
        'keys = None if duplicates == "negative" else target_keys(classifiers)',
        "keys = None",
    ),
    (
        "labels are mixed targets",
        "    if targets.dim() == 1:\n        return label_loss(scores, targets, virtual, reduction)\n",
        "    targets = F.one_hot(targets, scores.shape[1]) if targets.dim() == 1 else targets\n",
    ),
    (
        "labels scored in half precision",
        "    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))\n",
        "",
    ),
    (
        "module does not look at its weights",
        "            check_class_weights(class_weights)\n",
        "            pass\n",
    ),
    ("module forgets its temperature", "temperature=self.temperature,", ""),
    ("module forgets its negatives", "negatives=self.negatives,", ""),
    ("module forgets its duplicates", "duplicates=self.duplicates,", ""),
    ("module forgets to centre", "centred=self.centred,", ""),
    ("never centred", "centre(scores, classifiers) if options.centred else scores", "scores"),
    (
        "the mean taken off without a gradient",
        "(scores @ classifiers.mean",
        "(scores.detach() @ classifiers.mean",
    ),
    (
        "the mean over classes taken off",
        "(scores @ classifiers.mean(dim=0))[:, None]",
        "scores.mean(1, True)",
    ),
    ("module forgets its class weights", "class_weights=self.class_weights,", ""),
    ("module forgets its reduction", "reduction=self.reduction,", ""),
    ("module forgets virtual pairs", "            virtual=virtual,\n", ""),
]

HIDDEN = [
    (
        "hook stays",
        "        yield\n    finally:\n        hook.remove()",
        "        yield\n    finally:\n        pass",
    ),
    (
        "hook stays after an exception",
        "    try:\n        yield\n    finally:\n        hook.remove()",
        "    yield\n    hook.remove()",
    ),
    ("other inputs dropped", "pairs), *args[1:]), kwargs", "pairs),), kwargs"),
    (
        "inputs passed by name stay clean",
        "{**kwargs, first: mix_inputs(as_features(name, kwargs.get(first)), pairs)}",
        "kwargs",
    ),
    (
        "mixes at all places but one",
        "torch.where(chosen, pairs.weight, 1.0)",
        "torch.where(chosen, 1.0, pairs.weight)",
    ),
    (
        "mixes at every place",
        "here = Pairs(pairs.partner, torch.where(chosen, pairs.weight, 1.0), pairs.lam)",
        "here = pairs",
    ),
    ("always the first place", "place.floor() == number", "torch.zeros_like(place) == number"),
    ("mixes before the classifier too", "tuple(candidates.values())[:-1]", "tuple(candidates.values())"),
    (
        "mixes before the classifier that was found",
        "return tuple(candidates[name] for name in names[:-1])",
        "return tuple(candidates[name] for name in names)",
    ),
    ("a module that is not called passes", "    if calls == 0:", "    if False:"),
    ("a module that is called twice passes", "    if calls > 1:", "    if False:"),
    ("checkpointed modules pass", "is_checkpointed(sys._getframe(1)):", "False:"),
    ("compiled models pass", '    return "_orig_mod" in module._modules or', "    return"),
    ("models compiled in place pass", ' or getattr(module, "_compiled_call_impl", None) is not None', ""),
    ("the same module twice passes", "    if len(set(modules)) < len(modules):", "    if False:"),
    ("modules called twice are found", "if calls == 1]", "if calls]"),
    ("branches are found", "exchanges(model, candidates[n], rows, expected, tolerance)", "True"),
    ("the search does not restore modes", "            module.training = training\n", "            pass\n"),
    ("the search draws", "torch.random.fork_rng(devices), keep", "keep"),
    ("the search is not remembered", "        _found[model] = tuple(names[:-1])\n", "        pass\n"),
    ("an unverified search is remembered", "if verified and len(names) > 1:", "if len(names) > 1:"),
    ("containers are mixed at", 'getattr(child.forward, "__func__", None) is nn.Module.forward', "False"),
    ("a body is not opened", "    while children:\n", "    while False:\n"),
]

OBJECTIVE = [
    ("clean weight dropped", "loss + method.clean_weight * clean_loss(", "loss + clean_loss("),
    (
        "clean weight halved",
        "loss + method.clean_weight * clean_loss(",
        "loss + 0.5 * method.clean_weight * clean_loss(",
    ),
    (
        "joint forward in the other order",
        "clean, mixed = call_model(model, join_batches(images, inputs)).chunk(2)",
        "mixed, clean = call_model(model, join_batches(images, inputs)).chunk(2)",
    ),
    ("joint forward is two", "    if method.joint:", "    if False:"),
    ("scores - log counts", "scores + class_counts.log()", "scores - class_counts.log()"),
    (
        "counts of another length pass",
        "if class_counts is not None and len(class_counts) != scores.shape[1]:",
        "if False:",
    ),
    ("empty classes pass", "    check_no_empty_class(class_counts)\n", ""),
    ("weights by size, not its inverse", "class_weights = 1 / class_counts", "class_weights = class_counts"),
    (
        "mixed labels not smoothed",
        "mixed.shape[1], label_smoothing=method.label_smoothing)",
        "mixed.shape[1])",
    ),
    ("clean labels not smoothed", "0.0 if smoothed else method.label_smoothing", "0.0"),
    ("clean labels not checked", "        check_labels(labels, scores.shape[1])\n", ""),
    ("narrow integers refused", "        labels = labels.long()\n", ""),
    ("prob ignored", "pairs if method.prob == 1.0 else leave_unmixed(", "pairs if True else leave_unmixed("),
    (
        "CutMix in batch mode always",
        "draw_cutmix(labels, method.alpha, size, mode=method.mode, generator=generator)",
        "draw_cutmix(labels, method.alpha, size, generator=generator)",
    ),
    (
        "Mixup in batch mode always",
        "draw_mixup(labels, method.alpha, mode=method.mode, generator=generator)",
        "draw_mixup(labels, method.alpha, generator=generator)",
    ),
    ("kappa for tau", "tau=method.tau,", "tau=method.kappa,"),
    ("switch_prob ignored", "            switch_prob=method.switch_prob,\n", ""),
    ("cutmix_alpha ignored", "            cutmix_alpha=method.cutmix_alpha,\n", ""),
    ("temperature ignored", "        temperature=method.temperature,\n", ""),
    ("negatives ignored", "        negatives=method.negatives,\n", ""),
    ("duplicates ignored", "        duplicates=method.duplicates,\n", ""),
    ("a centred method is not", "        centred=method.centred,\n", ""),
    ("class weights ignored", "        class_weights=class_weights,\n", ""),
    ("virtual pairs ignored", "        virtual=virtual,\n", ""),
    (
        "virtual pairs of another alpha",
        "method.num_virtual, method.alpha, generator)",
        "method.num_virtual, 1.0, generator)",
    ),
    (
        "virtual pairs off the generator",
        "method.num_virtual, method.alpha, generator)",
        "method.num_virtual, method.alpha)",
    ),
    ("size of a box ignored", "    if size is None:\n", "    if True:\n"),
    ("compiled modules not looked for", "        check_none_compiled(model, modules)\n", ""),
    (
        "mixed term of a clean method adjusted",
        'scores = adjust(scores, method.class_sizes == "adjust", class_counts',
        "scores = adjust(scores, False, class_counts",
    ),
    ("adjustment of strength 1 always", "class_counts.log() * tau", "class_counts.log()"),
    (
        "clean scores adjusted with strength 1",
        "class_counts, method.adjust_tau)\n    return cross_entropy(scores, labels",
        "class_counts)\n    return cross_entropy(scores, labels",
    ),
    (
        "mixed scores adjusted with strength 1",
        "class_counts, method.adjust_tau)\n        return cross_entropy(scores, targets",
        "class_counts)\n        return cross_entropy(scores, targets",
    ),
    (
        "Infinite Class scores adjusted with strength 1",
        "class_counts, method.adjust_tau),\n        targets,",
        "class_counts),\n        targets,",
    ),
    ("focal factor dropped", "    if method.focal_gamma:\n", "    if False:\n"),
    ("focal factor p^gamma", "(-log_p.expm1()).clamp", "log_p.exp().clamp"),
    ("focal gamma 1 always", " ** method.focal_gamma", ""),
    ("focal factor with an infinite slope", ".clamp(min=1e-12)", ""),
    (
        "focal loss of labels that are not smoothed",
        "(1 - label_smoothing) * shares + label_smoothing / scores.shape[1]",
        "shares",
    ),
    (
        "focal loss in half precision",
        "    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))\n",
        "",
    ),
    ("LDAM: margins added", "scores - ldam_margins(", "scores + ldam_margins("),
    ("LDAM: margins dropped", "    if method.margin:\n", "    if False:\n"),
    (
        "LDAM: margins of the other classes too",
        "ldam_margins(class_counts, method.margin) * shares",
        "ldam_margins(class_counts, method.margin)",
    ),
    ("LDAM: n^(-1/2)", "class_counts) ** 0.25", "class_counts) ** 0.5"),
    (
        "LDAM: the largest class has the largest margin",
        "(class_counts.min() / class_counts)",
        "(class_counts / class_counts.max())",
    ),
    (
        "LDAM without class counts",
        'method.class_sizes != "none" or method.margin)',
        'method.class_sizes != "none")',
    ),
    ("DRW: weights dropped", "        shares = shares * effective_weights(class_counts)\n", "        pass\n"),
    ("DRW: weights upside down", "1 / -torch.expm1(", "-torch.expm1("),
    ("DRW: weights 1 / n", "-torch.expm1(class_counts * math.log(EFFECTIVE_BETA))", "class_counts"),
    ("DRW: beta 0.999", "EFFECTIVE_BETA = 0.9999", "EFFECTIVE_BETA = 0.999"),
    (
        "DRW: mean over images, not over weights",
        "(mean_over_ranks(shares.sum()) if weighed else shares.sum())",
        "len(shares)",
    ),
    ("DRW: a method that defers passes", "    if method.defer:\n", "    if False:\n"),
]

METHODS = [
    (
        "RegMixup with Mixup's alpha",
        '"regmixup": Method(draw="mixup", alpha=20.0',
        '"regmixup": Method(draw="mixup"',
    ),
    (
        "axes exchanged",
        '"ic-mixup-c": Method(draw="mixup", axes=("class",))',
        '"ic-mixup-c": Method(draw="mixup", axes=("pair",))',
    ),
    ("unknown draws are Mixup", '    check_choice("draw", method.draw, get_args(Draw))\n', ""),
    ("axes without mixing pass", 'if self.draw == "none" and self.axes:', "if False:"),
    ("no loss passes", 'if self.draw == "none" and not self.clean_weight:', "if False:"),
    (
        "settings without effect pass",
        "value != entry.default and not self.uses(entry.name, value)",
        "False",
    ),
    ("weights without the pair axis pass", '"weigh": "pair" in self.axes,', '"weigh": True,'),
    ("virtual pairs without pairs pass", ' and "pairs" in self.negatives', ""),
    ("every setting applies", " if self.uses(name, value)}", "}"),
    ("focal: gamma 1", "focal_gamma=2.0)", "focal_gamma=1.0)"),
    (
        "LDAM: margin 0.5 of scores that are not scaled",
        '"ldam": Method(draw="none", clean_weight=1.0, margin=15.0)',
        '"ldam": Method(draw="none", clean_weight=1.0, margin=0.5)',
    ),
    (
        "LDAM-DRW: weights after half of training",
        'margin=15.0, class_sizes="effective", defer=0.8)',
        'margin=15.0, class_sizes="effective", defer=0.5)',
    ),
    (
        "DRW: weights after half of training",
        'clean_weight=1.0, class_sizes="effective", defer=0.8)',
        'clean_weight=1.0, class_sizes="effective", defer=0.5)',
    ),
    (
        "DRW: weights from the start",
        'self.class_sizes if progress >= self.defer else "none"',
        "self.class_sizes",
    ),
    ("DRW: weights at the end of the epoch", "progress >= self.defer", "progress > self.defer"),
    ("DRW: weights before, not after", "progress >= self.defer", "progress < self.defer"),
    ("tau without adjustment passes", '"adjust_tau": self.adjusts', '"adjust_tau": True'),
    ("adjustment after training is none", '"adjust-clean", "adjust-after")', '"adjust-clean")'),
    (
        "adjustment after training stays in training",
        'replace(self, class_sizes="none", adjust_tau=1.0)',
        "self",
    ),
]

ADJUSTMENT = [
    ("scores are adjusted the other way", "scores - tau * shift", "scores + tau * shift"),
    ("scores are adjusted with strength 1", "scores - tau * shift", "scores - shift"),
    ("of several taus the farthest from 1", "abs(tau - 1)", "-abs(tau - 1)"),
    ("rounding errors decide between taus", "round(loss_of(tau), 9)", "loss_of(tau)"),
    ("log n instead of its share", "(counts / counts.sum()).log()", "counts.log()"),
]

CALIBRATION = [
    ("loss over images, not classes", "weights = len(labels) / (", "weights = 1 + 0 * ("),
    ("loss of the scores as they are", "scores.double() * inverse", "scores.double()"),
    ("classes without images count", "int((sizes > 0).sum())", "len(sizes)"),
    ("the temperature of the image-weighted loss", "weight @ mean.squeeze(1)", "mean.sum()"),
    ("the inverse of the temperature", "return 1 / best_inverse(", "return best_inverse("),
]

CHECKS = [
    ("an axis given twice passes", " or len(set(axes)) != len(axes)", ""),
    (
        "True is a number",
        "isinstance(value, Real) and not isinstance(value, bool)",
        "isinstance(value, Real)",
    ),
    (
        "nan is a number",
        "-math.inf < value < math.inf and low <= value <= high",
        "not (value < low or value > high)",
    ),
    ("1 is True", "value == choice and isinstance(value, type(choice))", "value == choice"),
    ("partners out of range pass", " <= int(partner.max()) < len(labels):", ":"),
    ("negative partners pass", "0 <= int(partner.min()) <=", "-9 <= int(partner.min()) <="),
    ("shares of any sum pass", "~((total - 1).abs() <= SHARES_TOLERANCE) |", ""),
    ("nan shares pass", "~((total - 1).abs() <= SHARES_TOLERANCE)", "((total - 1).abs() > SHARES_TOLERANCE)"),
    ("negative shares pass", " | (least < -SHARES_TOLERANCE)", ""),
    ("weights of zero pass", "(class_weights > 0)", "(class_weights >= 0)"),
    (
        "float labels pass",
        "(labels.is_floating_point() or labels.dtype == torch.bool)",
        "labels.dtype == torch.bool",
    ),
    ("one class passes", "    if scores.shape[1] == 1:", "    if False:"),
    ("kappa below 1 passes", '"kappa", kappa, 1, math.inf', '"kappa", kappa, 0, math.inf'),
    ("any fused passes", '    check_choice("fused", fused, ("auto", True, False))\n', ""),
    (
        "virtual targets of any sum pass",
        '        check_shares("virtual targets", virtual)\n',
        "        pass\n",
    ),
]

INPUTS = [
    ("token ids are mixed", "        if not tensor.is_floating_point():", "        if False:"),
    ("a dict is passed as a tuple", "output = model(**inputs)", "output = model(*inputs.values())"),
    ("logits are not looked for", 'getattr(output, "logits", output)', "output"),
    (
        "logits of a dict are not looked for",
        'output.get("logits") if isinstance(output, Mapping)',
        "output if isinstance(output, Mapping)",
    ),
    ("scores of pixels pass", "    if scores.dim() != 2:", "    if False:"),
    (
        "joint batches in the other order",
        "torch.cat([tensor, next(others)])",
        "torch.cat([next(others), tensor])",
    ),
]

MIXER = [
    ("hidden mixing passes", '    if method.draw == "manifold":', "    if False:"),
    ("clean terms pass", '    if method.clean_weight and method.draw != "none":', "    if False:"),
    ("labels are not smoothed", "smoothing = self.method.label_smoothing", "smoothing = 0.0"),
    (
        "the generator is not used",
        "self.method, counts, self.generator, self.size)",
        "self.method, counts, None, self.size)",
    ),
    ("the size is not used", "counts, self.generator, self.size)", "counts, self.generator)"),
    (
        "the criterion ignores labels",
        "        if targets.dim() == 1:\n            return label_loss(scores, targets)\n",
        "",
    ),
]

LARGE_BATCH = [
    ("the scaler is not used", "value if scaler is None else scaler.scale(value)", "value"),
    (
        "the scaled loss is returned",
        "    value = loss(all_scores)\n    (value if scaler is None else scaler.scale(value)).backward()",
        "    value = loss(all_scores) * (1 if scaler is None else scaler.get_scale())\n    value.backward()",
    ),
    ("buffers change twice", "with torch.no_grad(), keep_buffers(model):", "with torch.no_grad():"),
    ("dropout draws anew", "            set_random_state(state, devices)\n", ""),
]

FIRST_ORDER = [
    ("second derivatives are of a constant", "    if not torch.is_grad_enabled():\n", "    if True:\n"),
]

MODULES = {
    "pairs": PAIRS,
    "contrast.request": CONTRAST_REQUEST,
    "contrast.plain": CONTRAST_PLAIN,
    "loss": LOSS,
    "hidden": HIDDEN,
    "objective": OBJECTIVE,
    "methods": METHODS,
    "adjustment": ADJUSTMENT,
    "calibration": CALIBRATION,
    "_checks": CHECKS,
    "inputs": INPUTS,
    "mixer": MIXER,
    "large_batch": LARGE_BATCH,
    "_first_order": FIRST_ORDER,
}
MUTANTS = [Mutant(module, *mutant) for module, mutants in MODULES.items() for mutant in mutants]
