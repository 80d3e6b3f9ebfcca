#!/bin/sh
# Keeps the list of replicas as the name server tells it, and lets nginx read it anew when it changed. Running streams
# stay with the old workers until they end.
set -eu
: "${REPLICAS_NAME:=cloud-replica}" "${REPLICAS_PORT:=8090}" "${REPLICAS_INTERVAL:=5}"
list=/tmp/replicas.conf

found() {
    getent ahostsv4 "$REPLICAS_NAME" | awk -v port="$REPLICAS_PORT" '{print "server " $1 ":" port " fail_timeout=5s;"}' | sort -u
}

servers=$(found)
until [ -n "$servers" ]; do
    sleep 1
    servers=$(found)
done
printf '%s\n' "$servers" > "$list"
nginx -c /etc/souschef/nginx.conf &
nginx=$!
trap 'kill -QUIT "$nginx"; wait "$nginx"; exit 0' TERM INT QUIT
while kill -0 "$nginx" 2> /dev/null; do
    sleep "$REPLICAS_INTERVAL" &
    wait $! || true
    servers=$(found)
    if [ -n "$servers" ] && [ "$servers" != "$(cat "$list")" ]; then
        printf '%s\n' "$servers" > "$list"
        kill -HUP "$nginx"
    fi
done
wait "$nginx"
