"""Exit status 0 when the service on this port is alive. Runs every few seconds, so it imports next to nothing."""

import http.client
import sys

connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=4)
connection.request("GET", "/health")
sys.exit(connection.getresponse().status != 200)
