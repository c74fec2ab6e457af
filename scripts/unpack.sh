#!/bin/sh
# Join the parts of scripts/thin_environment.py, which lie beside this file, into an environment: unpack.sh INTO
# It sees the packages of `python3`'s own environment behind its own, for CUDA's libraries.
set -eu
from=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
cd "$1"
into=$(pwd)
decompress() {
    PYTHONPATH=$from python3 -c '
import sys, zstandard
zstandard.ZstdDecompressor(max_window_size=2**27).copy_stream(sys.stdin.buffer, sys.stdout.buffer)'
}
python3 -m venv --without-pip v
version=$(v/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ "$version" != "$(cat "$from/python")" ]; then
    echo "error: these packages are for Python $(cat "$from/python"), and python3 is $version" >&2
    exit 1
fi
site=$(v/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
host=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cat "$from"/part* | decompress | tar xf -
rmdir "$site" && mv site "$site"
echo "$host" >"$site/zz_host.pth"
# Its own first: NCCL is newer there.
folders() { find "$1/nvidia" -name '*.so*' -printf '%h\n' 2>/dev/null | sort -u; }
libraries=$( (folders "$site"; folders "$host") | tr '\n' ':')
cat >env.sh <<EOF
export PATH="$into/v/bin:\$PATH" LD_LIBRARY_PATH="$libraries\${LD_LIBRARY_PATH:-}"
export SGLANG_DISABLE_CUDNN_CHECK=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE
EOF
v/bin/python -m compileall -q -j 0 "$site" >/dev/null 2>&1 || true
echo ". '$into/env.sh'"
