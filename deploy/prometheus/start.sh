#!/bin/sh
# Prometheus takes keys from files only. They come as variables and stay in memory: /tmp is a tmpfs.
set -eu
umask 077
mkdir -p /tmp/keys
printf %s "${METRICS_KEY:?must be set}" > /tmp/keys/edge
printf %s "${CLOUD_API_KEY:?must be set}" > /tmp/keys/cloud
exec prometheus \
    --config.file=/etc/souschef/prometheus.yml \
    --storage.tsdb.path=/data \
    --storage.tsdb.retention.time="${PROMETHEUS_RETENTION:-15d}" \
    --web.listen-address=:9090
