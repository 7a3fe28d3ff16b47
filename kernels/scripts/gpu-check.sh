#!/usr/bin/env bash
# Runs the parity suite of the kernels on a GPU: every op against its f64 reference, as CI does in the emulator.
#
#   where there is cargo:  kernels/scripts/gpu-check.sh pack FOLDER      builds the program, copies it and this script
#   where there is a GPU:  FOLDER/gpu-check.sh [FOLDER OF LIBRARIES]...  needs no cargo and no network
#
# The GPU's machine (x86-64 Linux) needs NVIDIA's driver, libnvrtc and libcublasLt: of a CUDA toolkit, of the python
# packages nvidia-cuda-nvrtc and nvidia-cublas, or in the folders given. DRIVETRAIN_CUDA_DEVICE chooses the device.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

if [ "${1-}" = pack ]; then
    to=${2:?name a folder to pack into}
    mkdir -p "$to"
    to=$(cd "$to" && pwd)
    cd "$here/../.."
    # cargo names the program it built: "Executable tests/parity/main.rs (PATH)".
    built=$(cargo test --release --package drivetrain-kernels --features cuda --test parity --no-run 2>&1 | tee /dev/stderr)
    program=$(sed -n 's/^ *Executable .*(\(.*\))$/\1/p' <<<"$built")
    cp "$program" "$to/parity"
    cp "$here/gpu-check.sh" "$to/gpu-check.sh"
    echo "packed: $to/gpu-check.sh, $to/parity"
    exit
fi

folders=("$@")
for folder in "$(python3 -c 'import site; print(site.getsitepackages()[0])' 2>/dev/null || true)"/nvidia/*/lib; do
    [ -d "$folder" ] && folders+=("$folder")
done
export DRIVETRAIN_CUDA_DEVICE=${DRIVETRAIN_CUDA_DEVICE:-0}
export DRIVETRAIN_CUDA_LIBRARIES=$(IFS=:; echo "${folders[*]}${DRIVETRAIN_CUDA_LIBRARIES:+:$DRIVETRAIN_CUDA_LIBRARIES}")
nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv || echo "nvidia-smi is not there"
exec "$here/parity" --test-threads=1
