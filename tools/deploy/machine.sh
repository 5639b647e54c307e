# shellcheck shell=bash
# Detects the machine's GPUs and programs, and derives settings from them and from the environment.
# shellcheck disable=SC2154,SC2034  # shares variables with deploy_multi_gpu.sh

# Sets gpu_uuids, gpu_names (in the driver's order), driver, mps_program, nvlink, systemd_version.
detect_machine() {
  gpu_uuids=() gpu_names=()
  driver="" nvlink=no mps_program="" systemd_version=0
  detect_gpus
  if command -v nvidia-cuda-mps-control >/dev/null; then
    mps_program="$(command -v nvidia-cuda-mps-control)"
  fi
  if command -v systemctl >/dev/null; then
    systemd_version="$(systemctl --version | sed -n '1s/^systemd \([0-9]*\).*/\1/p')"
  fi
}

detect_gpus() {
  command -v nvidia-smi >/dev/null || return 0
  local answer code=0 line
  answer="$(timeout 60 nvidia-smi --query-gpu=uuid,name --format=csv,noheader 2>&1)" || code=$?
  # 6: no device found. 9: the driver is not loaded.
  if [ "$code" = 6 ] || [ "$code" = 9 ] || [[ "$answer" == *"No devices were found"* ]]; then
    return 0
  fi
  [ "$code" = 0 ] || fail "nvidia-smi failed ($code): $answer
    repair the driver, or hide nvidia-smi from PATH to deploy on the CPU"
  while IFS= read -r line; do
    if [[ "$line" == GPU-* ]]; then
      gpu_uuids+=("${line%%,*}")
      gpu_names+=("${line#*, }")
    fi
  done <<<"$answer"
  [ "${#gpu_uuids[@]}" -gt 0 ] || return 0
  driver="$(timeout 60 nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sed -n 1p)"
  if timeout 60 nvidia-smi nvlink --status 2>/dev/null | grep 'Link 0:.*GB/s' >/dev/null; then
    nvlink=yes
  fi
}

print_machine() {
  if [ "${#gpu_uuids[@]}" = 0 ]; then
    say "NVIDIA GPU: none, the workers run on the CPU"
  else
    say "NVIDIA GPU: ${#gpu_uuids[@]} found (${gpu_names[0]}), driver $driver, NVLink: $nvlink"
    [[ "${driver%%.*}" =~ ^[0-9]+$ ]] || fail "nvidia-smi reports no driver version but '$driver': repair the driver"
    [ "${driver%%.*}" -ge 525 ] ||
      fail "driver $driver is too old for CUDA 12: install driver 525 or newer (580 for CUDA 13), or hide nvidia-smi from PATH to deploy on the CPU"
    say "MPS: ${mps_program:-not installed, the workers run without}"
  fi
}


# truth NAME: "true", "false", or "" if it is not set.
truth() {
  case "${!1:-}" in
    "") ;;
    [tT]rue | 1 | yes | on) printf true ;;
    [fF]alse | 0 | no | off) printf false ;;
    *) fail "$1 is true or false, not '${!1}'" ;;
  esac
}

# Sets chosen (the UUIDs of the GPUs to use, in order) and worker_count.
choose_devices() {
  local ids="${MULTI_GPU_DEVICE_IDS:-}" id index count="${GPU_COUNT:-0}"
  [[ "$count" =~ ^[0-9]+$ ]] || fail "GPU_COUNT is a whole number, 0 for all GPUs; not '$count'"
  if [ -z "$ids" ] && [ -n "${PRIMARY_GPU_ID:-}${SECONDARY_GPU_IDS:-}" ]; then
    local primary="${PRIMARY_GPU_ID:-0}"
    ids="$primary"
    if [ -n "${SECONDARY_GPU_IDS:-}" ]; then
      ids="$ids,$SECONDARY_GPU_IDS"
    else # the primary GPU, then all others
      for index in "${!gpu_uuids[@]}"; do
        [ "$index" = "$primary" ] || [ "${gpu_uuids[index]}" = "$primary" ] || ids="$ids,$index"
      done
    fi
  fi
  chosen=()
  if [ -n "$ids" ]; then
    IFS=', ' read -r -a ids <<<"$ids"
    for id in "${ids[@]}"; do
      id="$(uuid_of "$id")"
      chosen+=("$id")
    done
  else
    chosen=("${gpu_uuids[@]}")
  fi
  local enabled
  enabled="$(truth MULTI_GPU_ENABLED)" # an assignment alone: only then a failure ends the script
  if [ "$enabled" = false ]; then
    count=1
  fi
  if [ "$count" -gt 0 ] && [ "${#gpu_uuids[@]}" -gt 0 ]; then
    [ "$count" -le "${#chosen[@]}" ] || fail "GPU_COUNT is $count, and there are ${#chosen[@]} GPUs to choose from"
    chosen=("${chosen[@]:0:count}")
  fi
  worker_count="${workers:-${WORKER_COUNT:-}}"
  if [ -z "$worker_count" ]; then
    worker_count="${#chosen[@]}"
    [ "$worker_count" -gt 0 ] || worker_count=2
  fi
  [[ "$worker_count" =~ ^[1-9][0-9]*$ ]] || fail "WORKER_COUNT is a whole number from 1 on, not '$worker_count'"
}

# The UUID of a GPU, by its index or UUID.
uuid_of() {
  local index
  for index in "${!gpu_uuids[@]}"; do
    if [ "$1" = "$index" ] || [ "$1" = "${gpu_uuids[index]}" ]; then
      echo "${gpu_uuids[index]}"
      return
    fi
  done
  fail "there is no GPU '$1': this machine has ${#gpu_uuids[@]}, counted from 0 (\`nvidia-smi -L\`)"
}

# Sets settings (lines "section key value" of config.toml) and library_env (lines NAME=value for the workers).
choose_settings() {
  settings="" library_env=""
  local strategy threshold interval
  strategy="${LOAD_BALANCING_STRATEGY:-}"
  case "${MULTI_GPU_STRATEGY:-}" in
    "") ;;
    memory) agree_on_strategy memory_usage ;;
    utilization) agree_on_strategy compute_load ;;
    *) agree_on_strategy "$MULTI_GPU_STRATEGY" ;;
  esac
  case "$strategy" in
    "" | auto | round_robin | least_loaded | memory_usage | compute_load | task_type | static_partition) ;;
    *) fail "there is no strategy '$strategy': round_robin, memory_usage, compute_load, task_type, static_partition or auto" ;;
  esac
  set_to master strategy "$strategy"
  threshold="${MEMORY_THRESHOLD:-}"
  [[ "$threshold" =~ ^([0-9]+(\.[0-9]+)?)?$ ]] || fail "MEMORY_THRESHOLD is a percentage, not '$threshold'"
  set_to master memory_threshold_percent "$threshold"
  local mps tf32 tensor_cores nvlinked
  mps="$(truth ENABLE_MPS)"
  tf32="$(truth ENABLE_TF32)"
  tensor_cores="$(truth ENABLE_TENSOR_CORES)"
  nvlinked="$(truth ENABLE_NVLINK)"
  if [ "$mps" = false ]; then mps=off; else mps=auto; fi
  set_to worker mps "$mps"
  set_to worker stats_file "${MULTI_GPU_STATS_FILE:-}"
  interval="${MULTI_GPU_STATS_INTERVAL:-}"
  [[ "$interval" =~ ^([0-9]+(\.[0-9]+)?)?$ ]] || fail "MULTI_GPU_STATS_INTERVAL is seconds, not '$interval'"
  set_to worker stats_interval_s "$interval"
  if [ "$tensor_cores" = false ]; then
    tf32=false # float32 uses Tensor Cores only as TF32
  fi
  case "$tf32" in
    true) library_env+="TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1"$'\n' ;;
    false) library_env+="NVIDIA_TF32_OVERRIDE=0"$'\n' ;;
  esac
  if [ "$nvlinked" = false ]; then
    library_env+="NCCL_P2P_DISABLE=1"$'\n'
  fi
  pass_on
}

# Variables that the workers read themselves (docs/configuration.md), passed on unchanged.
WORKER_NAMES=(
  EMBEDDING_MODEL EMBEDDING_BATCH_SIZE EMBEDDING_CACHE_ENABLED EMBEDDING_CACHE_SIZE EMBEDDING_CACHE_TTL
  EMBEDDING_CACHE_PERSISTENCE USE_TENSORRT TENSORRT_PRECISION TENSORRT_CACHE_DIR TENSORRT_INT8_CALIBRATION
  TENSORRT_INT8_CALIBRATION_CACHE ENABLE_TENSOR_CORES ENABLE_DYNAMIC_BATCHING
)
pass_on() {
  local name
  for name in "${WORKER_NAMES[@]}"; do
    [ -n "${!name:-}" ] || continue
    # systemd interprets these characters.
    case "${!name}" in *[\"\'\\]* | *$'\n'*) fail "$name has a quote, a backslash or a line break: ${!name}" ;; esac
    library_env+="$name=${!name}"$'\n'
  done
}

agree_on_strategy() {
  [ -z "$strategy" ] || [ "$strategy" = "$1" ] ||
    fail "LOAD_BALANCING_STRATEGY=$strategy and MULTI_GPU_STRATEGY=$MULTI_GPU_STRATEGY contradict each other: set one"
  strategy="$1"
}

# set_to SECTION KEY VALUE: adds a setting, unless the value is empty.
set_to() {
  [ -z "$3" ] || settings+="$1 $2 $3"$'\n'
}

# The settings of one section, as TOML.
settings_of() {
  local section key value
  while read -r section key value; do
    [ "$section" = "$1" ] || continue
    if [[ "$value" =~ ^[0-9.]+$ ]]; then echo "$key = $value"; else echo "$key = \"$value\""; fi
  done <<<"$settings"
}

# Exports the settings as variables, for a fleet without a configuration file. Variables that are set take precedence.
export_settings() {
  local section key value name
  while read -r section key value; do
    [ -n "$section" ] || continue
    name="MGPU_${section^^}_${key^^}"
    [ -n "${!name:-}" ] || export "$name=$value"
  done <<<"$settings"
  while IFS= read -r name; do
    [ -z "$name" ] || export "${name?}"
  done <<<"$library_env"
}
