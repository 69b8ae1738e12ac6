"""What a user of Testcontainers for Python writes. Prints what it sees as JSON.

Run as a program with DOCKER_HOST and RYUK_CONTAINER_IMAGE. It ends as a program that is killed:
without its exit handlers, so that the reaper has to remove everything.
"""

import json
import os
import urllib.request
from pathlib import Path

from testcontainers.core.container import DockerContainer
from testcontainers.core.image import DockerImage
from testcontainers.core.network import Network
from testcontainers.core.wait_strategies import LogMessageWaitStrategy

here = Path(__file__).parent
seen: dict[str, object] = {}
network = Network().create()
server = (
    DockerContainer("busybox")
    .with_command(["sh", "-c", "echo served > /index.html; echo ready; exec httpd -f -h /"])
    .with_exposed_ports(80)
    .with_env("A", "b")
    .with_network(network)
    .with_network_aliases("server")
    .with_volume_mapping(str(here), "/scripts", "ro")
    .waiting_for(LogMessageWaitStrategy("ready"))
    .start()
)
url = f"http://{server.get_container_host_ip()}:{server.get_exposed_port(80)}/index.html"
with urllib.request.urlopen(url, timeout=60) as answer:
    seen["published"] = answer.read().decode()
other = DockerContainer("busybox").with_command("sleep 1000").with_network(network).start()
seen["by name"] = other.exec(["wget", "-qO", "-", "http://server/index.html"]).output.decode()
seen["environment"] = server.exec("sh -c 'echo $A'").output.decode()
seen["mounted"] = server.exec(["ls", "/scripts"]).output.decode().split()
seen["logs"] = server.get_logs()[0].decode()
with DockerImage(path=here / "image", tag="made-by-testcontainers:1") as image:
    seen["built"] = DockerContainer(str(image)).start().get_wrapped_container().wait()["StatusCode"]
seen["labels"] = server.get_wrapped_container().labels
print(json.dumps(seen), flush=True)
os._exit(0)
