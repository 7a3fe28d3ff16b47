#!/usr/bin/env bash
# Runs on a GPU what CI runs in the emulator, and times a step:
#   parity       every op against its f64 reference
#   on_device    conformance cases of the megatron engine with `device: cuda`
#   device_step  a training step with `device: cuda` and with `device: cpu`
#
#   where there is cargo:  kernels/scripts/gpu-check.sh pack FOLDER      builds the programs, copies them and this script
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
    # program NAME COMMAND...: cargo names what it built, "Executable tests/parity/main.rs (PATH)".
    program() {
        local name=$1 built
        shift
        built=$("$@" --no-run 2>&1 | tee /dev/stderr)
        cp "$(sed -n 's/^ *Executable .*(\(.*\))$/\1/p' <<<"$built")" "$to/$name"
    }
    features=(--release --package drivetrain-kernels --package drivetrain-megatron --features drivetrain-megatron/cuda)
    program parity cargo test "${features[@]}" --test parity
    program on_device cargo test "${features[@]}" --test on_device
    program device_step cargo bench "${features[@]:1}" --bench device_step
    cp "$here/gpu-check.sh" "$to/gpu-check.sh"
    echo "packed into $to: gpu-check.sh, parity, on_device, device_step"
    exit
fi

folders=("$@")
for folder in "$(python3 -c 'import site; print(site.getsitepackages()[0])' 2>/dev/null || true)"/nvidia/*/lib; do
    [ -d "$folder" ] && folders+=("$folder")
done
export DRIVETRAIN_CUDA_DEVICE=${DRIVETRAIN_CUDA_DEVICE:-0}
export DRIVETRAIN_CUDA_LIBRARIES=$(IFS=:; echo "${folders[*]}${DRIVETRAIN_CUDA_LIBRARIES:+:$DRIVETRAIN_CUDA_LIBRARIES}")
nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv || echo "nvidia-smi is not there"
"$here/parity" --test-threads=1
# Not the cases that read files of the sources.
"$here/on_device" --test-threads=1 --skip golden
CUDA_VISIBLE_DEVICES=$DRIVETRAIN_CUDA_DEVICE "$here/device_step"
