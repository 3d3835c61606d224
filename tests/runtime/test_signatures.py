"""Signed engines: `icc keygen`, `icc sign`, `icc verify --key`, `--require-signature`, and minisign's own files.

`data/minisign` was made by minisign 0.11 (Debian): `plain` without a password (-W), `locked` with "pass word", and
signatures of message.txt, hashed and legacy (-l).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import signal
import stat
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import icc
import pytest
from click.testing import CliRunner
from icc.compiler.cli import main
from icc.compiler.errors import OutputExistsError, WriteError
from icc.compiler.packing import pack_engine, unpack_engine
from icc.compiler.signing import make_keys, read_secret_key, sign_engine
from icc.runtime.errors import EngineChangedError, MissingExtraError, SignatureError, UsageError
from icc.runtime.format.load import open_engine, read_manifest
from icc.runtime.format.open_container import open_container
from icc.runtime.format.present import PROVENANCE_FILE, SBOM_FILE
from icc.runtime.trust.engine_signature import check_signature, read_public_key
from icc.runtime.trust.minisign import PublicKey, SecretKey
from sizes import SOAK

Make = Callable[..., Path]
DATA = Path(__file__).parent / "data" / "minisign"
MESSAGE = (DATA / "message.txt").read_bytes()
FORMS = ["toy.engine", "toy.icc"]


def no_password() -> bytes:
    raise AssertionError("nothing asks for a password")


@pytest.fixture
def key(tmp_path: Path) -> SecretKey:
    return make_keys(tmp_path / "own.key")


@pytest.fixture
def engines(make_engine: Make, tmp_path: Path) -> Path:
    """A directory with the toy engine, as a directory and as one file."""
    pack_engine(make_engine(), tmp_path / "toy.icc")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "written"), [("sign", "signing.sign_engine"), ("sbom", "origins.write_sbom"),
                             ("provenance", "origins.write_provenance")],
)  # fmt: skip
def test_what_is_half_written_is_removed_by_sigterm(
    command: str, written: str, make_engine: Make, key: SecretKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers: list[object] = []
    monkeypatch.setattr(f"icc.compiler.{written}", lambda *_: handlers.append(signal.getsignal(signal.SIGTERM)))
    option = ["--key", tmp_path / "own.key"] if command == "sign" else ["--model", tmp_path]
    done = CliRunner().invoke(main, [command, str(make_engine()), *map(str, option)])
    assert done.exit_code == 0 and handlers and signal.SIG_DFL not in handlers


def test_any_name_of_a_file_may_be_in_a_bill_of_materials(make_engine: Make, tmp_path: Path) -> None:
    """A name that equals that of another component, and one that is not valid UTF-8, which is written with escapes."""
    model = tmp_path / os.fsdecode(b"model\xff")
    model.mkdir()
    for name in (b"engine", b"runtime", b"checkpoint", b"\xff.json"):
        (model / os.fsdecode(name)).write_bytes(name)
    engine = make_engine()
    for command in ("sbom", "provenance"):
        done = CliRunner().invoke(main, [command, str(engine), "--model", str(model)])
        assert done.exit_code == 0, done.output
    found = json.loads((engine / SBOM_FILE).read_bytes())
    refs = [one["bom-ref"] for one in [found["metadata"]["component"], *found["components"]]]
    assert len(refs) == len(set(refs)) and "file:engine" in refs
    stated = json.loads((engine / PROVENANCE_FILE).read_bytes())["predicate"]["buildDefinition"]
    assert [one["name"] for one in stated["resolvedDependencies"]] == ["\\xff.json", "checkpoint", "engine", "runtime"]
    assert stated["externalParameters"]["model"] == "model\\xff" in [one["name"] for one in found["components"]]


@pytest.mark.parametrize("form", FORMS)
def test_a_signed_engine_is_verified_by_its_key_alone(form: str, engines: Path, key: SecretKey) -> None:
    engine, public = engines / form, str(engines / "own.key.pub")
    run = CliRunner()
    done = run.invoke(main, ["verify", str(engine), "--key", public])
    assert done.exit_code == 50 and done.output.startswith(f"error: {engine} is not signed")
    done = run.invoke(main, ["sign", str(engine), "--key", str(engines / "own.key")])
    assert done.exit_code == 0 and key.public.name in done.output
    for given in (public, key.public.text().splitlines()[1]):
        done = run.invoke(main, ["verify", str(engine), "--key", given])
        assert done.exit_code == 0 and f"signed by {key.public.name}; timestamp:" in done.output, done.output
    make_keys(engines / "other")
    done = run.invoke(main, ["verify", str(engine), "--key", str(engines / "other.pub")])
    assert done.exit_code == 50 and "the signature is by key" in done.output
    assert run.invoke(main, ["verify", str(engine), "--key", "nonsense"]).exit_code == 2
    assert run.invoke(main, ["run", str(engine), "-p", "abc", "--max-tokens", "4"]).output.startswith("defg")
    sign_engine(engine, SecretKey.new())  # replaces the signature
    assert run.invoke(main, ["verify", str(engine), "--key", public]).exit_code == 50


def test_a_signature_goes_along(engines: Path, key: SecretKey) -> None:
    """Packing and unpacking keep the signature; the manifest and the files do not change."""
    before = read_manifest(engines / "toy.icc")
    sign_engine(engines / "toy.engine", key)
    pack_engine(engines / "toy.engine", engines / "toy.icc", force=True)
    unpack_engine(engines / "toy.icc", engines / "back")
    for engine in (engines / "toy.icc", engines / "back"):
        assert check_signature(open_container(engine), read_manifest(engine), key.public).startswith("timestamp:")
        assert read_manifest(engine) == before
    sign_engine(engines / "toy.icc", key)
    assert (engines / "toy.icc").stat().st_mode & 0o777 == 0o755
    open_engine(engines / "toy.icc").close()  # its weights are still aligned


def test_what_is_signed_has_the_digest_of_every_file(engines: Path, key: SecretKey) -> None:
    """A changed byte of any file, an extra file, and a changed manifest are detected."""
    engine = engines / "toy.engine"
    sign_engine(engine, key)
    names = sorted(read_manifest(engine).files)
    assert {"weights.safetensors", "program.json", "kernels/any.so", "tokenizer/tokenizer.json"} <= {*names}
    for name in names:
        copy = engines / "copy"
        shutil.copytree(engine, copy)
        raw = bytearray((copy / name).read_bytes())
        raw[-1] ^= 1
        (copy / name).write_bytes(raw)
        with pytest.raises(EngineChangedError, match=name):
            icc.load(copy, require_signature=key.public.text())
        shutil.rmtree(copy)
    (engine / "runtime" / "__pycache__").mkdir(parents=True)
    (engine / "runtime" / "__pycache__" / "x.pyc").write_bytes(b"")
    done = CliRunner().invoke(main, ["verify", str(engine), "--key", key.public.text()])
    assert done.exit_code == 50 and "x.pyc is not what was signed" in done.output
    shutil.rmtree(engine / "runtime")
    raw = (engine / "engine.json").read_bytes()
    own = read_manifest(engine).digest
    changed = raw.replace(b'"target": "cpu"', b'"target": "gpu"')
    assert changed != raw
    blank = hashlib.sha256(changed.replace(own.encode(), b"0" * 64)).hexdigest()
    (engine / "engine.json").write_bytes(changed.replace(own.encode(), blank.encode()))  # with a new digest
    with pytest.raises(SignatureError, match="not of this file: it has changed"):
        check_signature(open_container(engine), read_manifest(engine), key.public)


@pytest.mark.parametrize("form", FORMS)
def test_loading_can_require_it(form: str, engines: Path, key: SecretKey) -> None:
    engine, public = engines / form, str(engines / "own.key.pub")
    command = ["run", str(engine), "-p", "abc", "--max-tokens", "4", "--require-signature", public]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 50 and "Traceback" not in done.output
    with pytest.raises(SignatureError, match="is not signed"):
        icc.load(engine, require_signature=public)
    sign_engine(engine, key)
    assert CliRunner().invoke(main, command).output.startswith("defg")
    with pytest.raises(UsageError, match="files that are verified"):
        icc.load(engine, require_signature=public, verify=False)
    with pytest.raises(UsageError, match="no public key"):
        icc.load(engine, require_signature="x")


def test_a_drafters_engine_is_signed_too(engines: Path, key: SecretKey) -> None:
    sign_engine(engines / "toy.engine", key)
    with pytest.raises(SignatureError, match=r"toy\.icc is not signed"):
        icc.load(engines / "toy.engine", spec=f"draft:{engines / 'toy.icc'}", require_signature=key.public.text())


def test_signing_verifies_first(engines: Path, key: SecretKey) -> None:
    engine = engines / "toy.engine"
    (engine / "program.json").write_bytes((engine / "program.json").read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(EngineChangedError):
        sign_engine(engine, key)
    assert sorted(path.name for path in engine.iterdir() if path.is_file()) == [
        "engine.json", "program.json", "weights.safetensors",
    ]  # fmt: skip


def test_keys_are_their_owners(tmp_path: Path, key: SecretKey) -> None:
    assert stat.S_IMODE((tmp_path / "own.key").stat().st_mode) == 0o600
    assert read_secret_key(tmp_path / "own.key", no_password) == key
    assert read_public_key(str(tmp_path / "own.key.pub")) == key.public
    assert "seed" not in repr(key) and "own" not in repr(key)
    with pytest.raises(OutputExistsError, match=r"own\.key exists"):
        make_keys(tmp_path / "own.key")
    made = CliRunner().invoke(main, ["keygen", str(tmp_path / "second")])
    assert made.exit_code == 0 and (tmp_path / "second.pub").is_file()


def test_a_key_where_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match=r"cannot write .*/no/folder/k: No such file or directory"):
        make_keys(tmp_path / "no" / "folder" / "k")


def test_a_key_is_made_and_signed_with(engines: Path, tmp_path: Path) -> None:
    engine, new = engines / "toy.engine", tmp_path / "new.key"
    signed = CliRunner().invoke(main, ["sign", str(engine), "--new-key", str(new)])
    assert signed.exit_code == 0 and (engine / "engine.json.minisig").is_file(), signed.output
    assert CliRunner().invoke(main, ["verify", str(engine), "--key", f"{new}.pub"]).exit_code == 0
    for keys in ([], ["--key", str(new), "--new-key", str(tmp_path / "other")]):
        wrong = CliRunner().invoke(main, ["sign", str(engine), *keys], standalone_mode=False)
        assert "give either --key or --new-key" in str(wrong.exception) + wrong.output


@pytest.mark.parametrize("name", ["hashed", "legacy"])
def test_signatures_of_minisign_are_read(name: str) -> None:
    public = PublicKey.parse((DATA / "plain.pub").read_text())
    text = (DATA / f"{name}.minisig").read_text()
    assert public.verify(text, MESSAGE) == text.splitlines()[2].removeprefix("trusted comment: ")
    with pytest.raises(SignatureError, match="has changed"):
        public.verify(text, MESSAGE + b"x")
    with pytest.raises(SignatureError, match="trusted comment has changed"):
        public.verify(
            text.replace("trusted comment: ", "trusted comment: x").replace(
                "untrusted comment: x", "untrusted comment: "
            ),
            MESSAGE,
        )
    with pytest.raises(SignatureError, match="is by key DC2E2152C4933864, not by 2E1922D3CB7284C5"):
        public.verify((DATA / "locked.minisig").read_text(), MESSAGE)


def test_keys_of_minisign_are_read_and_written_alike() -> None:
    public = PublicKey.parse((DATA / "plain.pub").read_text())
    assert public.text() == (DATA / "plain.pub").read_text()
    secret = SecretKey.parse((DATA / "plain.key").read_text(), no_password)
    assert secret.public == public
    assert public.verify(secret.sign(MESSAGE, "message.txt"), MESSAGE).endswith("\tfile:message.txt\thashed")


@pytest.mark.skipif(not SOAK, reason="takes 1 GiB and some seconds")
def test_a_key_with_a_password_of_minisign_is_read() -> None:
    text = (DATA / "locked.key").read_text()
    assert SecretKey.parse(text, lambda: b"pass word").public == PublicKey.parse((DATA / "locked.pub").read_text())
    with pytest.raises(UsageError, match="the password is wrong"):
        SecretKey.parse(text, lambda: b"other")


def locked(key: SecretKey, password: bytes, operations: int, memory: int, cost: tuple[int, int]) -> str:
    """The text of a key under a password. operations, memory: libsodium's limits, for which minisign uses scrypt with
    cost (N, p)."""
    secret = key.seed + key.public.raw
    checksum = hashlib.blake2b(b"Ed" + key.public.id + secret, digest_size=32).digest()
    held = key.public.id + secret + checksum
    stream = hashlib.scrypt(password, salt=bytes(32), n=cost[0], r=8, p=cost[1], dklen=104, maxmem=1 << 27)
    covered = bytes(a ^ b for a, b in zip(held, stream, strict=True))
    raw = struct.pack("<2s2s2s32sQQ104s", b"Ed", b"Sc", b"B2", bytes(32), operations, memory, covered)
    return f"untrusted comment: minisign encrypted secret key\n{base64.b64encode(raw).decode()}\n"


def test_a_key_is_named_as_minisign_names_it() -> None:
    assert PublicKey(bytes.fromhex("21de53b048b12b01"), bytes(32)).name == "12BB148B053DE21"


@pytest.mark.parametrize(
    ("operations", "memory", "cost"), [(32768, 16 << 20, (1024, 1)), (32768 * 8, 1 << 20, (1024, 8))]
)
def test_passwords(operations: int, memory: int, cost: tuple[int, int], tmp_path: Path, engines: Path) -> None:
    key = SecretKey.new()
    text = locked(key, b"pass word", operations, memory, cost)
    assert SecretKey.parse(text, lambda: b"pass word") == key
    (tmp_path / "locked.key").write_text(text)
    if shutil.which("minisign"):
        made = ["minisign", "-R", "-s", tmp_path / "locked.key", "-p", tmp_path / "locked.pub"]
        subprocess.run(made, check=True, input=b"pass word\n", capture_output=True)
        assert (tmp_path / "locked.pub").read_text() == key.public.text()
    command = ["sign", str(engines / "toy.engine"), "--key", str(tmp_path / "locked.key")]
    done = CliRunner().invoke(main, command, input="wrong\n")
    assert done.exit_code == 2 and "the password is wrong" in done.output and "Traceback" not in done.output
    assert CliRunner().invoke(main, command, input="pass word\n").exit_code == 0
    assert CliRunner().invoke(main, ["verify", command[1], "--key", key.public.text()]).exit_code == 0


@pytest.mark.skipif(shutil.which("minisign") is None, reason="minisign is not installed (apt-get install minisign)")
def test_minisign_reads_what_icc_writes(engines: Path, key: SecretKey) -> None:
    engine = engines / "toy.engine"
    sign_engine(engine, key)

    def minisign(*arguments: object) -> str:
        return subprocess.run(["minisign", *map(str, arguments)], check=True, capture_output=True, text=True).stdout

    said = minisign("-V", "-p", engines / "own.key.pub", "-m", engine / "engine.json")
    assert "Signature and comment signature verified" in said
    minisign("-S", "-W", "-s", engines / "own.key", "-m", engine / "engine.json")
    done = CliRunner().invoke(main, ["verify", str(engine), "--key", str(engines / "own.key.pub")])
    assert done.exit_code == 0 and "hashed" in done.output
    (engine / "engine.json").write_bytes((engine / "engine.json").read_bytes() + b" ")
    refused = subprocess.run(
        ["minisign", "-V", "-p", engines / "own.key.pub", "-m", engine / "engine.json"], capture_output=True
    )
    assert refused.returncode != 0


@pytest.mark.parametrize(
    "text",
    ["", "untrusted comment: x\n", "x\ny\nz\nw\n", "untrusted comment: x\n!!\ntrusted comment: y\nAAAA\n"],
)
def test_damaged_signatures_are_told(text: str, engines: Path, key: SecretKey) -> None:
    (engines / "toy.engine" / "engine.json.minisig").write_text(text)
    with pytest.raises(SignatureError, match="the signature file is damaged"):
        icc.load(engines / "toy.engine", require_signature=key.public.text())
    (engines / "toy.engine" / "engine.json.minisig").write_bytes(b"\xff\xfe")
    with pytest.raises(SignatureError):
        icc.load(engines / "toy.engine", require_signature=key.public.text())


@pytest.mark.parametrize("name", ["plain.pub", "message.txt", "absent.key"])
def test_what_is_no_key_is_told(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        read_secret_key(DATA / name, no_password)


def test_without_cryptography(key: SecretKey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    with pytest.raises(MissingExtraError, match="cryptography") as caught:
        key.sign(b"x", "x")
    assert "icc-llm[sign]" in caught.value.hint
