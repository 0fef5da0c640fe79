#!/bin/sh
# Serves, with Triton's log on standard output: `docker run IMAGE [flags of tritandem serve]`.
# Anything that does not begin with a dash is run instead: `docker run IMAGE tritandem doctor`.
set -eu

case "${1:---}" in
    -*) ;;
    *) exec "$@" ;;
esac

# The server reads its own log back to tell progress and causes, so that it must be a file; `tritandem serve` bounds it,
# and `tail` follows through that. It ends with the server, which keeps this pid.
log="${TMPDIR:-/tmp}/triton.log"
(umask 077 && : > "$log")
tail --pid=$$ -n +1 -F "$log" 2>/dev/null &

# Inside a container every interface is the container's own; what is published decides who reaches it.
exec tritandem serve --host 0.0.0.0 --log-file "$log" "$@"
