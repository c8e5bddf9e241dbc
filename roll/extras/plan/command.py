"""The command ``roll plan``: a configuration, planned for a kind of device, as a page, JSON or a launcher."""

from __future__ import annotations

import functools
import json as jsonlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.pipeline.cli import EXIT_USAGE, read_config, report

if TYPE_CHECKING:
    from roll.configs.pipeline import PipelineConfig
    from roll.configs.problems import ConfigProblem
    from roll.extras.plan.devices import Device
    from roll.extras.plan.plan import Plan
    from roll.models.shapes import ModelShape


def plan(
    config_name: str,
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    devices: str | None = None,
    json: bool = False,
    write: str | None = None,
    output: str | None = None,
    pictures: int | None = None,
) -> int:
    """Says what a configuration takes, or writes its launcher.

    Args:
        devices: kind of device, see ``parse_devices``; that of this machine, if not given.
        write: ``slurm`` or ``kuberay``: the launcher goes where the page would.
        pictures: of each sample; one, if not given, where the policy takes any.

    Returns:
        0 where it fits, 1 where it does not, 2 for a wrong configuration or command line.
    """
    from roll.configs.problems import ConfigErrors
    from roll.extras.plan.devices import parse_devices, this_device
    from roll.extras.plan.launchers import launcher
    from roll.extras.plan.page import advise, faster, last_of_each_key, page, values

    if output is not None and write is None:
        sys.stderr.write("roll plan: -o/--output: expected --write slurm or --write kuberay with it\n")
        return EXIT_USAGE
    if pictures is not None and pictures < 0:
        sys.stderr.write(f"roll plan: --pictures: got {pictures}, expected 0 or more\n")
        return EXIT_USAGE
    try:
        device = parse_devices(devices) if devices else this_device()
    except ValueError as error:
        sys.stderr.write(f"roll plan: {error}\n")
        return EXIT_USAGE

    def replan(more: Sequence[str]) -> Plan:
        words = last_of_each_key([*overrides, *more]) if more else overrides  # the user's own are read as they are
        config, _ = read_config(config_name, folder, words)
        return planned(config, device, pictures)

    try:
        found = replan(())
    except ConfigErrors as errors:
        sys.stderr.write(report(errors, config_name))
        return EXIT_USAGE
    if write is not None:
        text = launcher(write, found, _command(config_name, folder, overrides))
        if output is None:
            sys.stdout.write(text)
            return 0
        try:
            Path(output).expanduser().write_text(text, encoding="utf-8")
        except OSError as error:
            sys.stderr.write(f"roll plan: -o {output}: {error.strerror}\n")
            return EXIT_USAGE
        sys.stderr.write(f"{output}: written\n")
        return 0
    advice, quicker = advise(found, replan), faster(found, replan)
    if json:
        sys.stdout.write(jsonlib.dumps(values(found, advice, quicker, config_name), indent=2) + "\n")
    else:
        sys.stdout.write(page(found, advice, quicker, config_name))
    return 0 if found.fits else 1


def model_shapes(config: PipelineConfig) -> dict[str, ModelShape]:
    """Sizes of every role's model, and of those that rewards hold.

    Raises:
        ConfigErrors: a model whose ``config.json`` is neither on this machine nor given by the hub.
    """
    from roll.configs.problems import ConfigErrors
    from roll.configs.rl import VAL_INFER
    from roll.extras.plan.plan import hosted_models, model_workers
    from roll.preflight.models import whole_config

    shapes: dict[str, ModelShape] = {}
    problems: dict[str, ConfigProblem] = {}
    for role, worker in model_workers(config).items():
        model = config.model_of(role)
        try:
            sizes = whole_config(config, "actor_infer" if role == VAL_INFER else role)
            if sizes is None:
                args = worker.model_args
                sizes = _sizes(model, args.model_config_kwargs, args.trust_remote_code)
            shapes[role] = _shape(sizes)
        except (OSError, ValueError) as error:
            key = next((key for key, name in config.models.items() if name == model), "pretrain")
            problems[key] = _unreadable(key, model, error)
    for hosted in hosted_models(config):
        try:
            kwargs = hosted.worker.model_args.model_config_kwargs
            sizes = _sizes(hosted.model, kwargs, hosted.trust_remote_code)
            found, blind = _shape(sizes), hosted.judge is not None and not getattr(hosted.judge, "pictures", False)
            shapes[hosted.key] = replace(found, tower=None) if blind else found
        except (OSError, ValueError) as error:
            problems[hosted.key] = _unreadable(hosted.key, hosted.model, error)
    if problems:
        raise ConfigErrors(list(problems.values()))
    return shapes


def planned(config: PipelineConfig, device: Device, pictures: int | None = None) -> Plan:
    """The plan of a configuration; for ``pictures`` see ``plan``.

    Raises:
        ConfigErrors: see ``model_shapes``.
    """
    from roll.configs.problems import ConfigErrors, ConfigProblem
    from roll.extras.plan.plan import make_plan
    from roll.preflight.models import pictures_refused

    shapes = model_shapes(config)
    tower, why = shapes["actor_train"].tower, pictures_refused(config)
    if pictures and (tower is None or why):
        reason = why or f"the tower of {config.pretrain} is none that is known here"
        raise ConfigErrors([ConfigProblem("--pictures", pictures, "0 or nothing", reason)])
    if pictures == 0 or tower is None or why:
        return make_plan(config, device, {name: replace(shape, tower=None) for name, shape in shapes.items()})
    most = config.actor_train.data_args.image_max_pixels or tower.bound(_picture_entries(config))
    return make_plan(config, device, shapes, 1 if pictures is None else pictures, most)


def _picture_entries(config: PipelineConfig) -> dict[str, Any]:
    """Bounds of the policy's picture processor, as far as they are known here."""
    from roll.configs.pipeline import TINY_VL
    from roll.models.tiny import processor_folder
    from roll.models.tokenizer import model_folder

    folder = processor_folder() if config.pretrain == TINY_VL else model_folder(config.pretrain)
    prepared = _entries(folder / "preprocessor_config.json")
    return {**prepared, **(prepared.get("size") or {})}


def _shape(sizes: Any) -> ModelShape:
    """Of a model's configuration, with its tower."""
    from roll.models.shapes import ModelShape, TowerShape

    return replace(ModelShape.of(sizes.get_text_config().to_dict()), tower=TowerShape.of(sizes.to_dict()))


def _entries(file: Path) -> dict[str, Any]:
    return jsonlib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _sizes(model: str, kwargs: Mapping[str, Any], trusts: bool) -> Any:
    """A model's configuration, from its folder, the hub, or the hub's cache where it is silent."""
    from roll.models.loading import load_config

    here = Path(model).expanduser().is_dir()
    return load_config(model, kwargs, trust_remote_code=trusts, asks_hub=here or _hub_answers())


@functools.cache
def _hub_answers() -> bool:
    """Tells whether the hub may be asked and answers: Transformers would try for half a minute, for every role."""
    from roll.preflight.inputs import HUB_SECONDS, ask_hub, hub_is_off

    return not hub_is_off() and ask_hub("models?limit=1", HUB_SECONDS) is not None


def _unreadable(key: str, model: str, error: Exception) -> ConfigProblem:
    from roll.configs.problems import ConfigProblem

    hint = f"a folder with nothing but its config.json is enough for a plan; {str(error).splitlines()[0]}"
    return ConfigProblem(key, model, "a model whose config.json can be read from here", hint)


def _command(config_name: str, folder: Path, overrides: Sequence[str]) -> list[str]:
    """The command line of the run."""
    from roll.configs import SHIPPED

    shipped = folder.resolve() == Path(SHIPPED).resolve()
    name = config_name if shipped else str(folder.resolve() / f"{config_name.removesuffix('.yaml')}.yaml")
    return ["roll", "train", name, *overrides]


def forecast(folder: Path) -> dict[str, Any]:
    """What is planned for a run's own configuration on this machine: ``device``, and ``seconds`` by phase of a step.

    Raises:
        ConfigErrors: it is not valid here, or a model's sizes are not known here.
    """
    from roll.extras.plan.devices import this_device

    config, _ = read_config("config", folder, [])
    device = this_device()
    seconds: dict[str, float] = {}
    for name, duration in planned(config, device).times.items():
        phase = name.partition(" ")[0]
        seconds[phase] = seconds.get(phase, 0.0) + duration.seconds
    tried = f" ({device.tried})" if device.tried else ""
    return {"device": f"{device.name}{tried}", "seconds": seconds}
