#!/bin/sh
# The password goes in by standard input: on the command line `ps` would show it.
set -eu
: "${REDIS_PASSWORD:?must be set}"
exec redis-server /etc/souschef/redis.conf - <<END
requirepass $REDIS_PASSWORD
END
