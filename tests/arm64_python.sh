#!/bin/bash
# tests/arm64_python.sh FOLDER: an arm64 Python with what engines need, under qemu, from Debian (as root) and PyPI.
# ICC_ARM64_PYTHON=FOLDER/python then has tests/cpu/test_arm64.py run whole engines there. FOLDER/python takes CPU, such as
# neoverse-n1, from the environment.
set -eu
mkdir -p "$1/debs" "$1/root" "$1/site" "$1/wheels"
folder=$(cd "$1" && pwd)
cd "$folder/debs"
dpkg --add-architecture arm64
trap 'dpkg --remove-architecture arm64' EXIT
apt-get update -qq
apt-get download -qq qemu-user-static
for package in libpython3.11-minimal libpython3.11-stdlib python3.11-minimal libc6 libexpat1 zlib1g libssl3 libffi8 \
    libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libgcc-s1 libstdc++6; do
    apt-get download -qq "$package:arm64"
done
dpkg -x qemu-user-static_*.deb "$folder/qemu"
for deb in *_arm64.deb; do dpkg -x "$deb" "$folder/root"; done
python3 -m pip download -q --no-deps --only-binary :all: --python-version 3.11 --platform manylinux2014_aarch64 \
    --platform manylinux_2_28_aarch64 -d "$folder/wheels" numpy msgspec tokenizers minijinja click rich
for wheel in "$folder"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$folder/site"; done
cat >"$folder/python" <<END
#!/bin/bash
exec $folder/qemu/usr/bin/qemu-aarch64-static -cpu "\${CPU:-max}" -L $folder/root -E PYTHONPATH=$folder/site \\
    -E PYTHONDONTWRITEBYTECODE=1 $folder/root/usr/bin/python3.11 "\$@"
END
chmod +x "$folder/python"
