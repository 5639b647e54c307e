# shellcheck shell=bash
# The services of this host: /opt/multigpu (code), /etc/multigpu (settings, keys), /var/lib/multigpu (journal), units.
# With --root DIR all paths are below DIR, and nothing is started.
# shellcheck disable=SC2154  # uses variables of deploy_multi_gpu.sh and machine.sh

opt="$prefix/opt/multigpu"
etc="$prefix/etc/multigpu"
lib="$prefix/var/lib/multigpu"
units="$prefix/etc/systemd/system"
unit_files=(mgpu.target mgpu-master.service mgpu-gateway.service mgpu-worker@.service mgpu-mps@.service mgpu-devices.service
  mgpu-certs.service mgpu-certs.timer mgpu-keys.service mgpu-worker-token.service)
# The units of a host that has joined another master.
joined_unit_files=(mgpu.target mgpu-worker@.service mgpu-mps@.service mgpu-devices.service)
drop_in_units=(mgpu-master.service mgpu-worker@.service mgpu-mps@.service)
links=("$prefix/usr/local/bin/mgpuctl")
changed=0

services_main() {
  if [ -z "$prefix" ] && [ "$dry_run" = 0 ] && [ "$(id -u)" != 0 ]; then
    fail "services need root: run it with sudo; or use --local, which doesn't"
  fi
  umask 022 # the services' user must be able to read the code
  detect_machine
  case "$action" in
    deploy | upgrade) services_deploy ;;
    rollback) services_rollback ;;
    status) services_status ;;
    uninstall) services_uninstall ;;
  esac
}

services_deploy() {
  [ "$systemd_version" -gt 0 ] || fail "there is no systemd here: use --local"
  if [ -z "$prefix" ] && [ "$dry_run" = 0 ] && ! [ -d /run/systemd/system ]; then
    fail "systemd doesn't run here (a container?): use --local, or --root DIR to prepare an image"
  fi
  if [ "$action" = upgrade ]; then
    [ -e "$opt/current" ] || fail "nothing is deployed yet: run it without --upgrade"
  fi
  take_previous_choices
  check_choices
  print_machine
  choose_devices
  choose_settings
  install_release
  make_user_and_directories
  write_settings
  make_certificates
  install_units
  switch_release
  start_services
}

# Makes `previous` the current release. Units and settings stay. `previous` is removed at the end, so that an interrupted
# run can be repeated.
services_rollback() {
  local target link
  if ! target="$(readlink "$opt/previous")" || ! [ -x "$opt/$target/bin/python" ]; then
    fail "there is no former release in $opt to go back to: an --upgrade keeps the one that it replaces, and a --rollback uses it up"
  fi
  release="$opt/$target"
  take_previous_choices
  [ -n "$join" ] || check_journal
  run ln -sfn "$target" "$opt/current.new"
  run mv -fT "$opt/current.new" "$opt/current"
  instances=()
  for link in "$units"/mgpu.target.wants/mgpu-worker@*.service; do
    link="${link##*/mgpu-worker@}"
    [ "$link" = "*.service" ] || instances+=("${link%.service}")
  done
  if [ "$dry_run" = 1 ]; then
    echo "would replace: the workers ${instances[*]}, then the master"
    say "nothing was done: a dry run"
    return
  fi
  if [ -z "$prefix" ]; then
    # The master is last: it serves older workers, but not newer ones.
    replace_workers "$(reached_at)"
    if [ -z "$join" ]; then
      say "master: replacing it"
      systemctl restart mgpu-master.service
    fi
    await_services "$(reached_at)"
  fi
  rm -f "$opt/previous" "$opt/replacing"
  drop_previous_releases
  say "back at $target"
}

# Rejects a release that cannot read the journal: an upgrade may have changed its schema.
check_journal() {
  local versions
  [ -f "$lib/journal.sqlite3" ] || return 0
  # The version may be in the write-ahead log only. Without a log, open it so that nothing is written beside the file.
  versions="$("$release/bin/python" -c '
import sqlite3, sys
from pathlib import Path
from multigpu_master.journal.sqlite.schema import SCHEMA_VERSION
path = Path(sys.argv[1]).absolute()
log = path.with_name(path.name + "-wal")
mode = "mode=ro" if log.exists() and log.stat().st_size else "mode=ro&immutable=1"
connection = sqlite3.connect(f"{path.as_uri()}?{mode}", uri=True)
print(connection.execute("PRAGMA user_version").fetchone()[0], SCHEMA_VERSION)
' "$lib/journal.sqlite3")" || fail "the schema version of $lib/journal.sqlite3 can't be read, see above. Nothing was changed"
  [ "${versions% *}" -le "${versions#* }" ] || fail "the journal $lib/journal.sqlite3 has schema version ${versions% *}, and the former release knows versions up to ${versions#* }.
    Nothing was changed. Stay with the present release; or stop mgpu.target, put a copy of $lib from before the upgrade
    in its place, which forgets every task since, and run --rollback again"
}

# Without new options a deployed fleet keeps its address or the master it joined, and its number of workers.
take_previous_choices() {
  local file="$etc/deployed"
  asked_workers="${workers:-${WORKER_COUNT:-}}"
  [ -f "$file" ] || return 0
  if [ -n "$listen" ] && edited "$etc/config.toml" && ! grep -qxF "listen = \"$listen\"" "$etc/config.toml"; then
    fail "$etc/config.toml was edited, so --listen would change nothing: set listen = \"$listen\" there, and run this again"
  fi
  local former_listen former_join
  former_listen="$(sed -n 's/^listen=//p' "$file")"
  former_join="$(sed -n 's/^join=//p' "$file")"
  if [ -z "$listen$join" ]; then
    listen="$former_listen" join="$former_join"
  fi
  [ -n "$asked_workers" ] || asked_workers="$(sed -n 's/^asked_workers=//p' "$file")"
  workers="$asked_workers"
  if [ -z "$workers" ] && [ "$action" = upgrade ]; then
    workers="$(sed -n 's/^workers=//p' "$file")"
  fi
}

check_choices() {
  [ -z "$join" ] || [ -z "$listen" ] || fail "--join and --listen: a host that joins has no master of its own"
  [ -n "$join$listen" ] || listen="127.0.0.1:7433"
  local address="${join:-$listen}"
  [[ "$address" =~ ^.+:[0-9]+$ ]] || fail "an address is HOST:PORT, not '$address'"
  secure=1
  case "$address" in 127.*:* | localhost:* | \[::1\]:*) secure=0 ;; esac
  if [ -n "$join" ] && [ "$secure" = 1 ]; then
    local file
    for file in certs/ca.crt certs/worker.crt certs/worker.key worker.token; do
      [ -f "$etc/$file" ] || [ -f "$credentials/${file#certs/}" ] ||
        fail "--join needs --credentials DIR with ca.crt, worker.crt, worker.key and worker.token of that fleet (docs/deploy.md)"
    done
  fi
}

# Each release has its own folder, so that running processes keep their files.
install_release() {
  release="$opt/releases/$(fingerprint | cut -c 1-12)"
  if [ "$dry_run" = 0 ]; then
    mkdir -p "$opt/releases"
  fi
  make_environment "$release"
  install_project "$release"
  [ "$dry_run" = 0 ] || return 0
  if ! [ -d "$release/docs" ]; then
    rm -rf "$release/docs.new"
    cp -r docs "$release/docs.new"
    mv "$release/docs.new" "$release/docs"
  fi
  if [ -n "$prefix" ]; then # what an image runs doesn't lie under DIR
    local program
    for program in "$release"/bin/mgpu*; do
      ! grep -q "^#!$prefix/" "$program" || sed -i "1s|^#!$prefix/|#!/|" "$program"
    done
  fi
}

make_user_and_directories() {
  put "$prefix/etc/sysusers.d/multigpu.conf" 644 <systemd/sysusers.d/multigpu.conf
  put "$prefix/etc/tmpfiles.d/multigpu.conf" 644 <systemd/tmpfiles.d/multigpu.conf
  local root_flag=()
  [ -z "$prefix" ] || root_flag=(--root "$prefix")
  run systemd-sysusers "${root_flag[@]}" "$prefix/etc/sysusers.d/multigpu.conf"
  run systemd-tmpfiles --create "${root_flag[@]}" "$prefix/etc/tmpfiles.d/multigpu.conf"
}

# A file that somebody edited since is left alone.
write_settings() {
  local token=""
  [ "$secure" = 0 ] || token=/etc/multigpu/worker.token
  {
    echo "# Written by deploy_multi_gpu.sh, which leaves it alone once it is edited. docs/configuration.md has every setting."
    echo "[client]"
    echo "master = \"$(reached_at)\""
    if [ "$secure" = 1 ]; then
      echo 'tls_ca = "/etc/multigpu/certs/ca.crt"'
      if [ -z "$join" ]; then
        printf '%s\n' 'tls_cert = "/etc/multigpu/certs/client.crt"' 'tls_key = "/etc/multigpu/certs/client.key"'
        echo 'token_file = "/var/lib/multigpu/admin.token"'
      fi
    fi
    if [ -z "$join" ]; then
      printf '\n[master]\n'
      echo "listen = \"$listen\""
      echo 'data_dir = "/var/lib/multigpu"'
      settings_of master
      if [ "$secure" = 1 ]; then
        printf '%s\n' 'tls_cert = "/etc/multigpu/certs/master.crt"' 'tls_key = "/etc/multigpu/certs/master.key"' \
          'tls_client_ca = "/etc/multigpu/certs/ca.crt"' 'require_tokens = true'
      fi
    fi
    printf '\n[worker]\n'
    echo "master = \"$(reached_at)\""
    settings_of worker
    echo 'mps_pipe_dir = "/run/multigpu/mps"'
    if [ "$secure" = 1 ]; then
      printf '%s\n' 'tls_ca = "/etc/multigpu/certs/ca.crt"' 'tls_cert = "/etc/multigpu/certs/worker.crt"' \
        'tls_key = "/etc/multigpu/certs/worker.key"'
      echo "token_file = \"$token\""
    fi
  } | put_unless_edited "$etc/config.toml" 640 root:multigpu
  {
    cat systemd/multigpu.env.example
    printf '%s' "$library_env"
  } | put_unless_edited "$etc/multigpu.env" 640 root:multigpu
  printf 'listen=%s\njoin=%s\nworkers=%s\nasked_workers=%s\n' "$listen" "$join" "$worker_count" "$asked_workers" |
    put "$etc/deployed" 640 root:multigpu
}

# The master's address for programs of this host.
reached_at() {
  local address="${join:-$listen}" name
  name="$(hostname)"
  [ -z "$prefix" ] || name=localhost # an image has no host name yet
  case "$address" in
    0.0.0.0:*) echo "$name:${address##*:}" ;;
    \[::\]:*) echo "$name:${address##*:}" ;;
    *) echo "$address" ;;
  esac
}

edited() {
  [ -f "$1" ] && ! { [ -f "$1.sha256" ] && [ "$(sha256sum <"$1")" = "$(cat "$1.sha256")" ]; }
}

# put_unless_edited FILE MODE OWNER: as put, unless FILE.sha256 differs from FILE.
put_unless_edited() {
  local text
  text="$(cat)"
  if edited "$1" && [ "$(cat "$1")" != "$text" ]; then
    say "kept: $1, which was edited"
    return 0
  fi
  put "$1" "$2" "$3" <<<"$text"
  put "$1.sha256" 600 <<<"$(sha256sum <<<"$text")"
}

# Creates an authority and certificates for this host's services. With --join they come from the fleet's host. An image
# has no keys: it creates them on its first boot.
make_certificates() {
  [ "$secure" = 1 ] || return 0
  local file
  if [ -n "$join" ]; then
    for file in ca.crt worker.crt worker.key; do
      [ -z "$credentials" ] || put "$etc/certs/$file" 640 root:multigpu <"$credentials/$file"
    done
    [ -z "$credentials" ] || put "$etc/worker.token" 640 root:multigpu <"$credentials/worker.token"
    return
  fi
  put "$opt/keys.sh" 755 <tools/deploy/keys.sh
  if [ -z "$prefix" ]; then
    make_certificates_in "$etc/certs" "$listen" "$release/bin/python" -m multigpu.cli
  fi
}

install_units() {
  local file unit
  changed=0
  for file in "${unit_files[@]}"; do
    if wanted_unit "$file"; then
      put "$units/$file" 644 <"systemd/$file"
    fi
  done
  for unit in "${drop_in_units[@]}"; do
    if [ "$systemd_version" -ge 254 ] && wanted_unit "$unit"; then
      put "$units/$unit.d/50-restart-steps.conf" 644 <systemd/drop-ins/50-restart-steps.conf
    fi
  done
  units_changed="$changed"
  plan_instances
  local enabled=(mgpu.target) instance
  if [ -z "$join" ]; then
    enabled+=(mgpu-master.service)
    [ "$secure" = 0 ] || enabled+=(mgpu-certs.timer mgpu-keys.service mgpu-worker-token.service)
  fi
  for instance in "${instances[@]}"; do
    enabled+=("mgpu-worker@$instance.service")
    if [ -n "$mps_program" ] && [[ "$settings" == *"worker mps auto"* ]] && [[ " ${gpu_uuids[*]} " == *" $instance "* ]]; then
      enabled+=("mgpu-mps@$instance.service")
    fi
  done
  local root_flag=()
  [ -z "$prefix" ] || root_flag=(--root "$prefix")
  drop_previous_instances "${enabled[@]}"
  run systemctl "${root_flag[@]}" --quiet enable "${enabled[@]}"
  services=("${enabled[@]}")
}

wanted_unit() {
  [ -z "$join" ] || [[ " ${joined_unit_files[*]} " == *" $1 "* ]]
}

# Sets instances. The first worker of a device is named after it; further workers have a file that names their device.
plan_instances() {
  local number device
  instances=()
  for ((number = 0; number < worker_count; number++)); do
    if [ "${#chosen[@]}" = 0 ]; then
      device=cpu
      instances+=("cpu-$number")
    else
      device="${chosen[number % ${#chosen[@]}]}"
      if [ "$number" -lt "${#chosen[@]}" ]; then
        instances+=("$device")
        continue
      fi
      instances+=("$device-$((number / ${#chosen[@]}))")
    fi
    {
      echo "# The device of this worker."
      echo "MGPU_WORKER_DEVICE=$device"
    } | put_unless_edited "$etc/worker-${instances[-1]}.env" 640 root:multigpu
    # %H is the host's name at boot, which is unknown in an image. The unit's own After= names the instance.
    printf '[Unit]\nAfter=mgpu-mps@%s.service\n\n[Service]\nEnvironment=MGPU_WORKER_WORKER_ID=%%H-%s\n' \
      "$device" "${instances[-1]}" |
      put "$units/mgpu-worker@${instances[-1]}.service.d/50-name.conf" 644
  done
}

# Disables workers that are not wanted any more: a removed GPU, or fewer --workers.
drop_previous_instances() {
  local link unit
  for link in "$units"/mgpu.target.wants/mgpu-worker@*.service; do
    unit="${link##*/}"
    [ -L "$link" ] || continue
    if [[ " $* " != *" $unit "* ]]; then
      say "no longer wanted: $unit"
      if [ -z "$prefix" ]; then
        run systemctl disable --now "$unit"
      else
        run systemctl --root "$prefix" --quiet disable "$unit"
      fi
      unit="${unit#mgpu-worker@}"
      run rm -f "$etc/worker-${unit%.service}.env" "$etc/worker-${unit%.service}.env.sha256"
      run rm -rf "$units/mgpu-worker@$unit.d"
    fi
  done
}

# The file `replacing` exists until no process runs the previous release: a repeated --upgrade goes on there.
switch_release() {
  local target="releases/${release##*/}" former
  former="$(readlink "$opt/current" 2>/dev/null || true)"
  if [ "$former" != "$target" ]; then
    if [ -n "$former" ]; then
      run ln -sfnT "$former" "$opt/previous"
      run touch "$opt/replacing"
    fi
    run ln -sfn "$target" "$opt/current.new"
    run mv -fT "$opt/current.new" "$opt/current"
  fi
  if [ "$(readlink "${links[0]}" 2>/dev/null)" != /opt/multigpu/current/bin/mgpuctl ]; then
    run mkdir -p "$(dirname "${links[0]}")"
    run ln -sfn /opt/multigpu/current/bin/mgpuctl "${links[0]}"
  fi
}

start_services() {
  if [ "$dry_run" = 1 ] && [ -z "$prefix" ]; then
    printf 'would start:'
    printf ' %s' "${services[@]}"
    printf '\n'
  fi
  if [ "$dry_run" = 1 ]; then
    print_paths
    say "nothing was done: a dry run"
    return
  fi
  if [ -n "$prefix" ]; then
    rm -f "$opt/replacing"
    drop_previous_releases
    print_paths
    return
  fi
  local ctl=("$opt/current/bin/mgpuctl") address
  address="$(reached_at)"
  [ "$units_changed" = 0 ] || systemctl daemon-reload
  if [ -z "$join" ]; then
    if [ "$action" = upgrade ] && [ -e "$opt/replacing" ]; then
      say "master: replacing it"
      systemctl restart mgpu-master.service
    else
      systemctl start mgpu-master.service
    fi
    [ "$secure" = 0 ] || make_worker_token "$etc/worker.token" "${ctl[@]}"
  fi
  say "starting ${#instances[@]} workers"
  systemctl start "${services[@]}"
  if [ "$action" = upgrade ] && [ -e "$opt/replacing" ]; then
    replace_workers "$address"
    rm -f "$opt/replacing"
    drop_previous_releases
  fi
  await_services "$address"
  print_paths
}

# Through the master where it runs on this host. A host that joined may not control it: its workers drain by themselves
# when they are stopped.
replace_workers() {
  local instance
  say "workers: replacing them, one after the other"
  if [ -z "$join" ] && systemctl is-active --quiet mgpu-master.service; then
    "$opt/current/bin/python" -m multigpu.cli.local.roll "$1" "$lib/upgrading"
    rmdir "$lib/upgrading"
  else
    for instance in "${instances[@]}"; do
      systemctl restart "mgpu-worker@$instance.service"
    done
  fi
}

# Removes all releases but `current` and `previous`.
drop_previous_releases() {
  local folder previous
  previous="$(readlink "$opt/previous" 2>/dev/null || true)"
  for folder in "$opt"/releases/*; do
    [ "$folder" = "$release" ] || [ "$folder" = "$opt/$previous" ] || rm -rf "$folder"
  done
}

# Units of Type=notify are active when they are ready. Whether they have reached the master only the master knows.
await_services() {
  local waited=0 count="${#instances[@]}" connected=0
  [ -z "$join" ] || return 0
  while [ "$waited" -lt 300 ]; do
    connected="$("$opt/current/bin/mgpuctl" workers --json | grep -c "\"host\": \"$(hostname)\"" || true)"
    [ "$connected" -lt "$count" ] || break
    sleep 1
    waited=$((waited + 1))
  done
  [ "$connected" -ge "$count" ] || fail "of $count workers $connected reached the master at $1: journalctl -u 'mgpu-*'"
  say "ready: master $1, $connected workers"
}

print_paths() {
  cat <<WHERE
==> where everything is
    code         $opt/current (mgpuctl: ${links[0]})
    settings     $etc/config.toml, $etc/multigpu.env
    units        $units/mgpu*: systemctl status 'mgpu*'
    logs         journalctl -u 'mgpu-*'
WHERE
  [ -n "$join" ] || echo "    journal      $lib"
  [ "$secure" = 0 ] || echo "    keys         $etc/certs"
}

services_status() {
  [ -e "$opt/current" ] || { echo "nothing is deployed here"; exit 3; }
  echo "code: $(readlink "$opt/current") in $opt"
  [ -z "$prefix" ] || return 0
  systemctl list-units --all --no-pager --no-legend 'mgpu*' || true
  systemctl is-active --quiet mgpu.target || { echo "mgpu.target is not active: systemctl start mgpu.target"; exit 3; }
  if [ -z "$(sed -n 's/^join=//p' "$etc/deployed")" ]; then
    "$opt/current/bin/mgpuctl" status
    "$opt/current/bin/mgpuctl" workers
  fi
}

services_uninstall() {
  if [ -e "$lib" ] && [ "$yes" = 0 ] && [ "$dry_run" = 0 ] && ! [ -t 0 ]; then
    fail "--uninstall asks before it removes $lib and $etc: run it in a terminal, or with --yes"
  fi
  local unit
  if [ -z "$prefix" ] && [ -d /run/systemd/system ]; then
    run systemctl stop mgpu.target 'mgpu-*'
  fi
  for unit in "$units"/mgpu*; do
    [ -e "$unit" ] || continue
    run rm -rf "$unit"
  done
  run rm -f "$units/multi-user.target.wants/mgpu.target" "$prefix/etc/sysusers.d/multigpu.conf" \
    "$prefix/etc/tmpfiles.d/multigpu.conf" "${links[@]}"
  run rm -rf "$opt" "$prefix/var/cache/multigpu" "$prefix/run/multigpu"
  if [ -z "$prefix" ] && [ -d /run/systemd/system ]; then
    run systemctl daemon-reload
  fi
  if [ "$dry_run" = 1 ]; then
    echo "would ask, then remove: $lib $etc $prefix/var/log/multigpu and the user multigpu"
  elif confirm "Remove $lib with all tasks and outcomes, $etc with its keys, $prefix/var/log/multigpu and the user?"; then
    rm -rf "$lib" "$etc" "$prefix/var/log/multigpu"
    if [ -n "$prefix" ]; then
      userdel --root "$prefix" multigpu 2>/dev/null || true
    elif id multigpu >/dev/null 2>&1; then
      userdel multigpu
    fi
    say "removed"
  else
    say "kept: $lib, $etc and the user multigpu"
  fi
}
