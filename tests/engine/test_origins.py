"""The inputs of an engine: `icc sbom`, `icc provenance`, and `icc verify --rebuild`, which compiles again."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import pytest
from click.testing import CliRunner, Result
from icc.compiler.cli import main
from icc.compiler.origins import licence_of
from icc.compiler.packing import pack_engine
from icc.compiler.signing import put_beside
from icc.runtime.format.load import read_manifest
from icc.runtime.format.open_container import open_container

SAMPLE = Path(__file__).parents[2] / "samples" / "pystd"
FORMS = ["own.engine", "own.icc"]


@pytest.fixture
def own(compiled: Callable[..., Any], tmp_path: Path) -> Path:
    """A directory with an engine in both forms, and with its checkpoint, which has a model card."""
    found = compiled("llama", quant="rtn4")
    shutil.copytree(found.engine, tmp_path / "own.engine")
    shutil.copytree(found.checkpoint, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\n")
    pack_engine(tmp_path / "own.engine", tmp_path / "own.icc")
    return tmp_path


def icc_command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("form", FORMS)
def test_the_bill_of_materials(form: str, own: Path) -> None:
    engine, model = own / form, own / "checkpoint"
    assert icc_command("sbom", engine, "--model", model).exit_code == 0
    raw = open_container(engine).read("sbom.cdx.json")
    found, manifest = json.loads(raw), read_manifest(engine)
    assert (found["bomFormat"], found["specVersion"], found["version"]) == ("CycloneDX", "1.6", 1)
    assert found["metadata"]["component"]["hashes"] == [{"alg": "SHA-256", "content": manifest.digest}]
    [compiler] = found["metadata"]["tools"]["components"]
    assert (compiler["name"], compiler["version"]) == ("icc-llm", icc.__version__)
    parts = {one["bom-ref"]: one for one in found["components"]}
    assert parts["checkpoint"]["licenses"] == [{"license": {"name": "apache-2.0"}}]
    assert parts["click"]["licenses"] == [{"license": {"id": "BSD-3-Clause"}}]
    for name in ("config.json", "model.safetensors"):
        assert parts[f"file:{name}"]["hashes"][0]["content"] == sha256(model / name)
    known = {*parts, "engine"}
    assert {ref for one in found["dependencies"] for ref in (one["ref"], *one["dependsOn"])} <= known
    assert icc_command("sbom", engine, "--model", model).exit_code == 0
    assert open_container(engine).read("sbom.cdx.json") == raw  # it has no timestamps
    assert icc_command("verify", engine).exit_code == 0
    icc.load(engine).close()
    missing = icc_command("sbom", engine, "--model", own / "absent")
    assert missing.exit_code == 2 and "does not exist" in missing.output


def test_licences_are_what_the_card_says(tmp_path: Path) -> None:
    assert licence_of(SAMPLE) == "psf-2.0"
    for text in ("# no front matter\nlicense: mit\n", "---\nlanguage: en\n---\n", ""):
        (tmp_path / "README.md").write_text(text)
        assert licence_of(tmp_path) == ""
    assert licence_of(tmp_path / "model.gguf") == ""


@pytest.mark.parametrize("form", FORMS)
def test_the_provenance(form: str, own: Path) -> None:
    engine, model = own / form, own / "checkpoint"
    assert icc_command("provenance", engine, "--model", model).exit_code == 0
    container = open_container(engine)
    found = json.loads(container.read("provenance.intoto.json"))
    digest = hashlib.sha256(container.read("engine.json")).hexdigest()
    assert found["_type"] == "https://in-toto.io/Statement/v1"
    assert found["subject"] == [{"name": "engine.json", "digest": {"sha256": digest}}]
    built = found["predicate"]["buildDefinition"]
    assert built["externalParameters"]["options"] == {"quant": "rtn4", "target": "native"}
    named = {one["name"]: one["digest"]["sha256"] for one in built["resolvedDependencies"]}
    assert named == {path.name: sha256(path) for path in model.iterdir() if path.name in named}
    assert {"config.json", "model.safetensors"} <= {*named}
    assert found["predicate"]["runDetails"]["builder"]["version"] == {"icc-llm": icc.__version__}
    for damaged in (b"[" * 100_000, b"{}", b'{"predicate": 5}', b"\xff"):
        put_beside(open_container(engine), {"provenance.intoto.json": damaged})
        refused = icc_command("verify", engine, "--rebuild", model)
        assert refused.exit_code == 20 and "provenance.intoto.json is damaged" in refused.output
    put_beside(open_container(engine), {"provenance.intoto.json": json.dumps(found).encode()})
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    refused = icc_command("verify", engine, "--rebuild", model)
    assert refused.exit_code == 51 and "config.json is not the file that provenance.intoto.json names" in refused.output


def test_a_compile_again_gives_the_same(own: Path) -> None:
    done = icc_command("verify", own / "own.icc", "--rebuild", own / "checkpoint")
    assert done.exit_code == 0 and "gives the same engine" in done.output, done.output
    config = json.loads((own / "checkpoint" / "generation_config.json").read_text())
    (own / "checkpoint" / "generation_config.json").write_text(
        json.dumps({**config, "do_sample": True, "temperature": 0.25})
    )
    other = icc_command("verify", own / "own.engine", "--rebuild", own / "checkpoint")
    assert other.exit_code == 51 and "gives another engine" in other.output, other.output
