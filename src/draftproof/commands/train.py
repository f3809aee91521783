"""draftproof train: from a log of traffic to a drafter that is accepted more when served. draftproof extract: hidden states to disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import LoadConfig
from ..errors import Failure, OptionError
from . import options as o
from .console import Pace, counted, emit_json, facts_lines, note, remaining

if TYPE_CHECKING:
    from ..audition.logs import Skipped
    from ..models.target import Target
    from ..train.corpus import Text
    from ..train.families import Wish
    from ..train.gate import Served
    from ..train.place import Place
    from ..train.team import Team


class Layers(click.ParamType[tuple[int, ...]]):
    """Layers by their 0-based numbers, separated by commas."""

    name = "I,J,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isdecimal() for part in parts):
            self.fail(f"{value!r}: expected layer ids separated by commas, as in 1,4,6", param, ctx)
        return tuple(int(part) for part in parts)


class Kind(click.Choice[str]):
    """A kind of drafter, by the name under which it is trained."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "eagle2":
            self.fail("eagle2 is another way to use an eagle head: train eagle, and serve it as eagle2:DIR", param, ctx)
        return super().convert(value, param, ctx)


DATA = click.option("--data", type=click.Path(dir_okay=False, path_type=Path), required=True, metavar="LOG",
                    help="Traffic: OpenAI chat or request/response pairs, ShareGPT, our traces, {prompt} or {text} lines, or a .txt file.")
KINDS = ("eagle", "eagle3", "peagle", "medusa", "hydra", "mlp", "mtp", "pard", "dflash", "dflash2", "dspark", "domino", "xpress",
         "model")


@click.command(short_help="Train a drafter on a log of traffic.")
@click.argument("kind", type=Kind(KINDS))
@o.target_option
@DATA
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, metavar="DIR",
              help="Where the drafter is published.")
@click.option("--steps", type=click.IntRange(1), default=1000, show_default=True,
              help="Updates of the weights, those of a killed run included.")
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Texts per step.")
@click.option("--lr", type=float, default=1e-3, show_default=True,
              help="Highest learning rate; it rises for 50 steps and falls over the last half.")
@click.option("--length", type=click.IntRange(16), default=512, show_default=True, help="Longest text in tokens.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 2), default=0, show_default=True,
              help="Of the order of texts, of which are held out, of the target's sampled answers and of random weights.")
@click.option("--init", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR", help="Go on from this drafter.")
@click.option("--draft-vocab", type=click.IntRange(1), metavar="N",
              help="Of eagle3, peagle, medusa: guess among the N tokens that the target writes most.")
@click.option("--layers", type=click.IntRange(1), metavar="N", help="Layers of a new head.  [default: the family's]")
@click.option("--depth", type=click.IntRange(1), metavar="N", help="Tokens guessed, or steps unrolled.  [default: the family's]")
@click.option("--mask-token", type=click.IntRange(0), metavar="ID",
              help="Of pard, peagle, dflash, dflash2, dspark, domino, xpress: a token that no text holds.")
@click.option("--taps", type=Layers(),
              help="Of eagle3, peagle: 0-based layers of the target whose outputs it reads.  "
                   "[default: 1, L/2 - 1, L - 4; of 4 to 6 layers 0, L/2 - 1, L - 2]")
@click.option("--accept-at", type=click.FloatRange(0.1, 2), metavar="TEMPERATURE",
              help="Of eagle3, peagle: learn to be accepted at this temperature, a second run from --init.  "
                   "[default: to know the target's law]")
@click.option("--shared", is_flag=True, help="Of mlp: use the target's embedding and output matrix instead of own ones.")
@click.option("--answers", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Where the target's answers are kept; drafters trained on one log may share it.  [default: in OUT.training]")
@click.option("--as-logged", is_flag=True, help="Learn from the logged answers instead of letting the target write them again.")
@click.option("--mix", type=click.Path(dir_okay=False, path_type=Path), metavar="LOG", help="General data to mix in, as it is logged.")
@click.option("--mix-share", type=click.FloatRange(0, 0.95), default=0.3, show_default=True,
              help="Of the texts learnt from, how many are of --mix.")
@click.option("--held-out", type=click.IntRange(1), default=16, show_default=True, help="Texts that only judge.")
@click.option("--keep-mb", type=click.IntRange(0), default=2048, show_default=True, metavar="N",
              help="Main memory for hidden states of texts that come again.")
@click.option("--matmul", type=click.Choice(("highest", "high", "medium")), default="highest", show_default=True,
              help="torch's precision of float32 products while learning. medium multiplies bfloat16 where the processor can: 1.7 times "
                   "as many steps with AMX, little elsewhere.")
@click.option("--replaces", metavar="SPEC",
              help="The drafter it must beat when served.  [default: what is in --out, else what --init goes on from]")
@o.unlisted("quantization", "cache_bits", "draft_device")
@o.load_options
@o.json_option
def train(kind: str, target: str | None, data: Path, out: Path, as_json: bool, **given: Any) -> int:
    """Train a drafter of KIND on --data and publish it in --out, unless it is served no better than what it replaces or goes on from.

    Killed at any moment, the same command goes on where it was. Working files are in OUT.training. On several GPUs:
    accelerate launch --num_processes N -m draftproof train …
    """
    from ..train.place import Place

    _check(target, data, given)
    place = Place.of(out, target)
    from ..train.families import Wish  # from here on torch is loaded
    from ..train.team import join

    wish = Wish(*(given[name] for name in ("init", "draft_vocab", "layers", "depth", "mask_token", "shared", "taps", "accept_at")))
    wish.check(kind)
    team = join(given["batch"])
    given["device"] = given["device"] or team.device
    with place.held(kind) if team.leads else nullcontext():
        team.wait()
        return _run(kind, target, data, place, wish, given, team, as_json)


def _check(target: str | None, data: Path, given: dict[str, Any]) -> None:
    """What can be told before anything is loaded."""
    from ..audition.logs import check_log

    o.check_target(target)
    if given["quantization"]:
        raise OptionError(f"--quantization {given['quantization']}: rounded weights cannot teach a drafter; leave it out here")
    if given["cache_bits"] == 8:
        raise OptionError("--cache-bits 8: rounded keys cannot teach a drafter; leave it out here")
    if given["draft_device"]:
        raise OptionError("--draft-device does nothing here: a drafter learns on the target's device; leave it out")
    for log in (data, given["mix"]):
        if log is not None:
            check_log(log)
    if given["answers"] is not None and not given["answers"].absolute().parent.is_dir():
        raise OptionError(f"--answers {given['answers']}: the folder does not exist; create it, or name a file elsewhere")
    if not 0 < given["lr"] < float("inf"):
        raise OptionError(f"--lr {given['lr']}: expected a number above 0")
    if given["replaces"]:
        from ..drafters import parse_spec  # loads torch

        parse_spec(given["replaces"])


def _run(kind: str, target: str | None, data: Path, place: Place, wish: Wish, given: dict[str, Any], team: Team, as_json: bool) -> int:
    import torch

    from ..train.families import begin
    from ..train.features import Tapper
    from ..train.gate import FEW, serve
    from ..train.loop import Plan, Shown
    from ..train.loop import train as run
    from ..train.place import identity

    say = note if team.leads else _silent
    model, texts, held = _material(target, data, place.work, wish, given, team, say)
    torch.manual_seed(given["seed"])          # a fresh drafter is the same one in a run that goes on
    own, wish = wish, wish.settled(kind, model)
    if wish is not own:
        say(f"{kind}: goes on from the one in the target's checkpoint; --layers N begins a new one")
    task = begin(kind, model, texts, wish)
    size = sum(p.numel() for p in task.module.parameters() if p.requires_grad)
    say(f"{kind}: {size / 1e6:.2f} M parameters to train, {counted(len(texts), 'text')} to learn from, {len(held)} held out; "
        f"processes: {team.size}")
    if len(held) < FEW:
        say(f"so few held-out texts ({len(held)}) judge little better than chance; a longer log or a higher --held-out gives more")
    depth = given["depth"] or 4

    def served(spec: str) -> Served:
        return serve(model, spec, held, depth, min(96, given["length"] // 2), given["seed"] + 1)

    looks: list[Served] = []

    def look() -> float:
        place.save(task.save)
        looks.append(served(f"{kind}:{place.candidate}"))
        return looks[-1].length

    def show(line: Shown) -> None:
        figures = " ".join(f"{name} {value:.3f}" for name, value in line.figures.items())
        reached = "" if line.served is None else f" · acceptance length when served {line.served:.2f}"
        left = f" · {remaining(line.left_s)}" if line.step < line.steps else ""
        note(f"step {line.step}/{line.steps} loss {line.loss:.3f} {figures} · {line.tokens_per_s:.0f} tokens/s{reached}{left}")

    plan = Plan(given["steps"], given["batch"], given["lr"], seed=given["seed"], matmul=given["matmul"])
    run(task, texts, Tapper(model, task.taps, keep_mb=given["keep_mb"]), plan, place.work, show, served=look,
        notes=_notes(kind, model, wish, given), team=team, say=say)
    team.leave()
    if not team.leads:
        return 0
    if not looks:
        note(f"all {plan.steps} steps were done by an earlier run of this command; nothing is left to learn")
        look()
    made = {"kind": kind, "target": identity(model.facts.name), "dtype": model.facts.dtype, "data": data.name, "steps": plan.steps,
            "texts": len(texts), "held_out": len(held), "acceptance_length": looks[-1].length, "rounds": looks[-1].rounds, "depth": depth}
    return _settle(kind, place, looks[-1], served, given["replaces"], own.begun(kind), {"parameters": size, **made}, as_json)


def _settle(kind: str, place: Place, new: Served, served: Callable[[str], Served], replaces: str | None, begun: str | None,
            made: dict[str, Any], as_json: bool) -> int:
    """The candidate against what it would replace: published if it is served better, with its card. begun: what it went on from; made: the
    facts of the card."""
    from ..train import card, checkpoint
    from ..train.gate import Verdict, judge

    standing, old = place.standing(), None
    rival = replaces or (f"{standing}:{place.out}" if standing else begun)
    if replaces or not place.same():
        old = served(rival) if rival else None
        verdict = judge(new, old, rival or "nothing")
    else:
        verdict = Verdict(True, f"acceptance length {new.length:.3f}, and it stands there already")
    card.write(place.candidate, made)
    checkpoint.finish(place.work / "checkpoint.safetensors")
    if verdict.publish:
        place.publish(kind)
    folder = place.out if verdict.publish else place.candidate
    note(f"published in {folder}: {verdict.reason}" if verdict.publish else f"not published: {verdict.reason}; it stays in {folder}")
    if as_json:
        emit_json({"published": verdict.publish, "reason": verdict.reason, "folder": str(folder), **made, "drafted": new.drafted,
                   "accepted": new.accepted, "difference": verdict.interval and dict(zip(("low", "high"), verdict.interval, strict=True)),
                   "rival": old and {"drafter": rival, "acceptance_length": old.length, "rounds": old.rounds}})
    return 0 if verdict.publish else 3


def _notes(kind: str, model: Target, wish: Wish, given: dict[str, Any]) -> dict[str, Any]:
    """What a run is, beside its plan and its texts: another one does not go on from its checkpoint."""
    from dataclasses import asdict

    from ..train.place import identity

    return {"kind": kind, **asdict(wish), "init": wish.init and identity(wish.init), "target": identity(model.facts.name),
            "dtype": model.facts.dtype, "length": given["length"], "mix": given["mix"] and str(given["mix"])}


@click.command(short_help="Write the target's hidden states to disk, for other trainers.")
@o.target_option
@DATA
@click.option("--layers", type=Layers(), required=True, help="0-based decoder layers whose outputs are kept.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, metavar="DIR",
              help="A new or empty folder for the shards.")
@click.option("--length", type=click.IntRange(16), default=2048, show_default=True, help="Longest text in tokens.")
@click.option("--shard-mb", type=click.IntRange(1), default=512, show_default=True, metavar="N",
              help="Size of a shard in megabytes, about.")
@o.load_options
@o.json_option
def extract(target: str | None, data: Path, layers: tuple[int, ...], out: Path, length: int, shard_mb: int, as_json: bool,
            **given: Any) -> None:
    """Dump ids, answer masks and hidden states of every text of a log as safetensors shards with an index."""
    from ..audition.logs import check_log, read_log

    o.check_target(target)
    check_log(data)
    from ..train.corpus import as_logged  # from here on torch is loaded
    from ..train.extract import extract as write

    model = _open(target, given, packed=True)           # as it is served, so that states are those to the bit
    for line in facts_lines(model.facts, _loading(given).cache_tokens):
        note(line)
    length = _capped(length, model, note)
    with _complaining(data, note) as skipped:
        index = write(model, as_logged(read_log(data, skipped), model, length, skipped), layers, out, shard_mb << 20,
                      Pace(note, "texts"))
    texts, shards = index["texts"], index["shards"]
    note(f"{counted(len(texts), 'text')} in {counted(shards, 'shard')}: {out}")
    if as_json:
        emit_json({"out": str(out), "texts": len(texts), "shards": shards, "tokens": sum(text["tokens"] for text in texts),
                   "layers": list(layers), "dtype": index["dtype"], "left_out": skipped.count})


def _silent(line: str) -> None:
    """What a process that does not lead says."""


def _loading(given: dict[str, Any]) -> LoadConfig:
    """Of the options; --depth is another's here."""
    from dataclasses import fields

    return o.settings_of({field.name: given[field.name] for field in fields(LoadConfig) if field.name in given}).load


def _open(target: str | None, given: dict[str, Any], packed: bool = False) -> Target:
    """The target with plain matrices, through which gradients can flow, or packed."""
    from dataclasses import replace

    from ..engine.setup import open_target

    o.check_target(target)
    return open_target(target, replace(_loading(given), packed=packed, self_test=False))


def _material(target: str | None, data: Path, work: Path, wish: Wish, given: dict[str, Any], team: Team,
              say: Callable[[str], None]) -> tuple[Target, list[Text], list[Text]]:
    """The target, and what `_texts` makes of the log."""
    model = _open(target, given, packed=not given["as_logged"])
    wish.fit(model)
    given["length"] = _capped(given["length"], model, say)
    texts, held = _texts(model, data, work, given, team, say)
    if not given["as_logged"]:                # answers come sooner from packed matrices, which have no gradients
        del model
        model = _open(target, given)
    for line in facts_lines(model.facts, _loading(given).cache_tokens):
        say(line)
    return model, texts, held


def _capped(length: int, model: Target, say: Callable[[str], None]) -> int:
    if length > model.context:
        say(f"--length {length}: the target's context is {model.context} tokens, and texts are cut to that")
    return min(length, model.context)


def _texts(model: Target, data: Path, work: Path, given: dict[str, Any], team: Team,
           say: Callable[[str], None]) -> tuple[list[Text], list[Text]]:
    """(texts to learn from, texts held out): the target's own answers unless told otherwise, with general data beside them."""
    from ..audition.logs import Exchange, read_log
    from ..engine.engine import Engine
    from ..train.corpus import apart, as_logged, mixed, regenerated, split

    with _complaining(data, say) as skipped:
        exchanges: Iterable[Exchange] = read_log(data, skipped)
        if given["as_logged"]:
            texts = list(as_logged(exchanges, model, given["length"], skipped))
        else:
            exchanges = list(exchanges)
            say(f"letting the target answer the prompts of the log ({len(exchanges)}) …")
            with Engine(model, "ngram") as engine:
                texts = regenerated(exchanges, engine, given["length"], given["seed"], given["answers"] or work / "answers.jsonl",
                                    Pace(say, "answers", len(team.share(exchanges))), team, skipped, say)
    learn, held = split(texts, min(0.5, given["held_out"] / max(1, len({text.prompt for text in texts}))), given["seed"])
    if given["mix"] is not None:
        with _complaining(given["mix"], say) as skipped:
            general = list(as_logged(read_log(given["mix"], skipped), model, given["length"], skipped))
        if not general:
            raise Failure(f"--mix {given['mix']} has no text that the target can read; expected messages, prompts or token ids")
        learn = mixed(learn, apart(general, held), given["mix_share"], given["seed"])
    return learn, held


@contextmanager
def _complaining(log: Path, say: Callable[[str], None]) -> Iterator[Skipped]:
    """Whatever comes of it, what was left out of the log is told, and why."""
    from ..audition.logs import Skipped

    skipped = Skipped()
    try:
        yield skipped
    finally:
        if skipped.count:
            more = " …" if skipped.count > len(skipped.shown) else ""
            say(f"{skipped.count} lines of {log} were left out: {'; '.join(skipped.shown)}{more}")
        for line in skipped.remarks():
            say(f"{log}: {line}")
