"""Where a drafter is published: nothing that a run did not put there is deleted, and what a kill cut short is put right."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftproof.cli import run
from draftproof.errors import Failure, OptionError
from draftproof.train import card
from draftproof.train.place import Place, identity, written


def drafter(folder: Path, mark: float = 0.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"0.0.linear.weight": torch.full((4, 4), mark), "0.1.weight": torch.zeros(9, 4)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 1, "medusa_num_layers": 1}), encoding="utf-8")


def everything(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.mark.parametrize("foreign", ["notes.md", "data/log.jsonl", "config.json", None])
def test_a_folder_with_anything_else_is_refused_before_a_target_is_loaded(foreign: str | None, tmp_path: Path,
                                                                          capsys: pytest.CaptureFixture[str]) -> None:
    out, log = tmp_path / "out", tmp_path / "log.jsonl"
    log.write_text("{}\n", encoding="utf-8")
    if foreign is None:
        out.write_text("a file", encoding="utf-8")
    elif foreign == "config.json":                                   # a model without weights, or a program's own settings
        out.mkdir()
        (out / foreign).write_text("{}", encoding="utf-8")
    else:
        drafter(out)
        (out / foreign).parent.mkdir(exist_ok=True)
        (out / foreign).write_text("mine", encoding="utf-8")
    before = everything(tmp_path)
    assert run(["train", "medusa", "--target", "org/unknown", "--data", str(log), "--out", str(out)]) in (1, 2)
    assert str(out) in capsys.readouterr().err
    assert {name: data for name, data in everything(tmp_path).items() if ".training" not in name} == before


def test_a_neighbour_named_old_stays_and_what_stood_there_goes_when_the_new_one_has_come(tmp_path: Path) -> None:
    drafter(tmp_path / "out", 1.0)
    drafter(tmp_path / "out.old", 5.0)
    old, place = everything(tmp_path / "out.old"), Place.of(tmp_path / "out", None)
    with place.held("medusa"):
        place.save(lambda folder: drafter(folder, 2.0))
        new = everything(place.candidate)
        assert not place.same()
        place.publish("medusa")
    assert everything(place.out) == new and everything(tmp_path / "out.old") == old
    assert sorted(f.name for f in place.work.iterdir()) == ["lock"]


def test_what_a_kill_between_the_renames_took_away_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter(tmp_path / "out", 1.0)
    old, place, replace = everything(tmp_path / "out"), Place.of(tmp_path / "out", None), os.replace

    def dies(source: Path, to: Path) -> None:
        if Path(to) == place.out:
            raise KeyboardInterrupt
        replace(source, to)

    with pytest.raises(KeyboardInterrupt), place.held("medusa"):
        place.save(lambda folder: drafter(folder, 2.0))
        monkeypatch.setattr(os, "replace", dies)
        place.publish("medusa")
    assert not place.out.exists()
    monkeypatch.setattr(os, "replace", replace)
    with place.held("medusa"):
        assert everything(place.out) == old and place.standing() == "medusa"


def test_what_a_kill_while_the_old_one_goes_leaves_is_in_nobodys_way(tmp_path: Path) -> None:
    place = Place.of(tmp_path / "out", None)
    with place.held("medusa"):
        place.save(lambda folder: drafter(folder, 1.0))
    drafter(place.work / "candidate.old", 5.0)
    with place.held("medusa"):
        place.save(lambda folder: drafter(folder, 2.0))
        place.publish("medusa")
    assert sorted(f.name for f in place.work.iterdir()) == ["lock"]


def test_something_that_came_while_it_was_trained_is_not_published_over(tmp_path: Path) -> None:
    place = Place.of(tmp_path / "out", None)
    with place.held("medusa"):
        place.save(drafter)
        place.out.mkdir()
        (place.out / "mine.txt").write_text("mine", encoding="utf-8")
        with pytest.raises(OptionError, match=r"mine\.txt"):
            place.publish("medusa")
    assert everything(place.out) == {"mine.txt": b"mine"}


def test_a_link_is_followed_and_the_current_folder_and_the_target_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    place = Place.of(tmp_path / "link", None)
    with place.held("medusa"):
        place.save(drafter)
        place.publish("medusa")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").exists() and (tmp_path / "real.training").exists()
    monkeypatch.chdir(tmp_path / "real")
    with pytest.raises(OptionError, match="the command runs in"):
        Place.of(Path("."), None)
    with pytest.raises(OptionError, match="target's own folder"):
        Place.of(tmp_path / "model", str(tmp_path / "model"))


def test_a_head_does_not_take_a_language_model_s_place(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    _, model = tiny_pair
    with pytest.raises(OptionError, match="a language model"):
        Place(model).check("eagle3")
    Place(model).check("model")


def test_two_runs_do_not_share_a_working_folder(tmp_path: Path) -> None:
    place = Place.of(tmp_path / "out", None)
    with place.held("medusa"), pytest.raises(Failure, match="another run works in"), place.held("medusa"):
        raise AssertionError("held twice")
    with place.held("medusa"):
        assert place.work.is_dir()


def test_weights_have_a_name_that_moves_with_them_and_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    drafter(tmp_path / "a" / "head", 1.0)
    drafter(tmp_path / "b" / "head", 1.0)
    drafter(tmp_path / "c" / "head", 2.0)
    one, same, other = (identity(tmp_path / name / "head") for name in "abc")
    assert one == same != other and identity("org/model") == "org/model"
    with pytest.raises(Failure, match=r"c\.bin could not be written .*goes on where it was"), written(tmp_path / "c.bin"):
        raise OSError(28, "No space left on device")


def test_a_page_that_somebody_wrote_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "head"
    drafter(out)
    (out / "README.md").write_text("what I know of this head")
    with pytest.raises(OptionError, match=r"holds README\.md"):
        Place.of(out, None).check("mlp")
    card.write(out, {"target": "x"})
    Place.of(out, None).check("mlp")
