#!/bin/bash
# Exit status 0 when the service on this port is alive. It runs as long as the service does, so it starts no other
# program: bash opens the connection itself.
exec 3<> "/dev/tcp/127.0.0.1/$1" || exit 1
printf 'GET /health HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n' >&3
read -r -t 4 status <&3
[[ $status == *' 200 '* ]]
