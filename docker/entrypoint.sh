#!/bin/sh
# Serves, with Triton's log on standard output: `docker run IMAGE [flags of tritandem serve]`.
# Anything that does not begin with a dash is run instead: `docker run IMAGE tritandem doctor`.
set -eu

case "${1:---}" in
    -*) ;;
    *) exec "$@" ;;
esac

# The server reads its own log back to tell progress and causes, so that it must be a file. It is cut off at
# LOG_BYTES: what matters has gone to standard output by then. Both helpers end with the server, which keeps this pid.
log="${TMPDIR:-/tmp}/triton.log"
LOG_BYTES=67108864
: > "$log"
tail --pid=$$ -n +1 -F "$log" 2>/dev/null &
while sleep 60 && kill -0 $$ 2>/dev/null; do
    [ "$(stat -c %s "$log")" -le "$LOG_BYTES" ] || : > "$log"
done &

# Inside a container every interface is the container's own; what is published decides who reaches it.
exec tritandem serve --host 0.0.0.0 --log-file "$log" "$@"
