# shellcheck shell=bash
# Makes the keys of the fleet's host: an authority, certificates, and a token for this host's workers. Existing files stay.
# Called by deploy_multi_gpu.sh, and by systemd on the first boot of an image that was made with --root.
set -euo pipefail

# make_certificates_in CERTS LISTEN MGPUCTL…
make_certificates_in() {
  local certs="$1" listen="$2" name hosts=(--host "$(hostname)" --host localhost --host 127.0.0.1)
  shift 2
  case "${listen%:*}" in 0.0.0.0 | \[::\]) ;; *) hosts+=(--host "${listen%:*}") ;; esac
  for name in $(hostname -I 2>/dev/null || true); do
    hosts+=(--host "$name")
  done
  [ -f "$certs/master.crt" ] || run "$@" certs issue "$certs" master "${hosts[@]}"
  [ -f "$certs/worker.crt" ] || run "$@" certs issue "$certs" worker
  # Services may read their keys, only root the authority's. Renewals keep owner and mode.
  run chmod 640 "$certs/master.key" "$certs/worker.key"
  ! getent group multigpu >/dev/null || run chgrp multigpu "$certs/master.key" "$certs/worker.key"
  # Last: mgpu-keys.service runs until this file exists.
  [ -f "$certs/client.crt" ] || run "$@" certs issue "$certs" client
}

# make_worker_token FILE MGPUCTL…: creates a token at the running master, as its first administrator.
make_worker_token() {
  local file="$1"
  shift
  [ ! -f "$file" ] || return 0
  rm -f "$file.new"
  "$@" tokens create "$(hostname)" --role worker --worker-id "$(hostname)-*" -o "$file.new"
  chmod 640 "$file.new"
  ! getent group multigpu >/dev/null || chgrp multigpu "$file.new"
  mv "$file.new" "$file"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  run() { "$@"; }
  case "$1" in
    certificates)
      make_certificates_in /etc/multigpu/certs "$(sed -n 's/^listen=//p' /etc/multigpu/deployed)" \
        /opt/multigpu/current/bin/mgpuctl
      ;;
    token) make_worker_token /etc/multigpu/worker.token /opt/multigpu/current/bin/mgpuctl ;;
  esac
fi
