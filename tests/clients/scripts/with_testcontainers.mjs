// What a user of Testcontainers for Node.js writes. Prints what it sees as JSON; its reaper removes
// everything after it.
import { GenericContainer, Network, Wait } from "testcontainers";
import path from "node:path";

const here = import.meta.dirname;
const seen = {};
const network = await new Network().start();
const server = await new GenericContainer("busybox")
  .withCommand(["sh", "-c", "cp /copied /index.html; echo ready; exec httpd -f -h /"])
  .withCopyContentToContainer([{ content: "served\n", target: "/copied" }])
  .withExposedPorts(80)
  .withEnvironment({ A: "b" })
  .withNetwork(network)
  .withNetworkAliases("server")
  .withTmpFs({ "/scratch": "size=1m" })
  .withHealthCheck({ test: ["CMD", "true"], interval: 200, timeout: 3000, retries: 50, startPeriod: 1000 })
  .withWaitStrategy(Wait.forAll([Wait.forLogMessage("ready"), Wait.forHealthCheck(), Wait.forListeningPorts()]))
  .start();
seen.published = await (await fetch(`http://${server.getHost()}:${server.getMappedPort(80)}/index.html`)).text();
const other = await new GenericContainer("busybox").withCommand(["sleep", "1000"]).withNetwork(network).start();
seen["by name"] = (await other.exec(["wget", "-qO", "-", "http://server/index.html"])).output;
seen.environment = (await server.exec(["sh", "-c", "echo $A; pwd; id -u"], { workingDir: "/tmp", user: "7", env: { A: "c" } })).output;
seen.status = (await server.exec(["sh", "-c", "exit 3"])).exitCode;
await server.restart({ timeout: 0 });
const alive = setInterval(() => {}, 1000); // the stream of logs alone does not keep node running
seen.logs = await new Promise(async (resolve) => {
  (await server.logs()).on("data", (line) => line.includes("ready") && resolve("ready"));
});
clearInterval(alive);
const image = await GenericContainer.fromDockerfile(path.join(here, "image")).build("made-by-testcontainers:2", { deleteOnExit: false });
const job = await image.withWaitStrategy(Wait.forOneShotStartup()).start();
seen.built = job.getId().length;
await job.stop();
console.log(JSON.stringify(seen));
process.exit(0);
