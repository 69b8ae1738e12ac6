// What a user of dockerode writes: a container, its streams, files, an exec, a build. Prints what it
// sees as JSON. The argument is the version of the API, or nothing: then paths have none.
import Docker from "dockerode";
import { Writable } from "node:stream";
import { buffer } from "node:stream/consumers";
import { setTimeout as sleep } from "node:timers/promises";
import path from "node:path";

const here = import.meta.dirname;
const [version] = process.argv.slice(2);
const docker = new Docker(version ? { version } : {});
const seen = { version: (await docker.version()).ApiVersion, ping: String(await docker.ping()) };

function sink() {
  const chunks = [];
  const stream = new Writable({ write(chunk, _, done) { chunks.push(chunk); done(); } });
  return [stream, () => Buffer.concat(chunks).toString()];
}

const [out, printed] = sink();
const [wrong, warned] = sink();
const [result, short] = await docker.run("busybox", ["sh", "-c", "echo out; echo err >&2; exit 3"], [out, wrong], {
  HostConfig: { NetworkMode: "none", Init: true }, Tty: false,
});
while (!printed() || !warned()) await sleep(10); // run() does not wait for the end of the streams
seen.run = [result.StatusCode, printed(), warned()];
await short.remove();

const network = await docker.createNetwork({ Name: "lan", Labels: { a: "b" } });
await docker.createVolume({ Name: "data" });
const container = await docker.createContainer({
  name: "long", Image: "busybox", Cmd: ["sh", "-c", "echo ready; exec cat"], OpenStdin: true, StdinOnce: true,
  Labels: { k: "v" }, ExposedPorts: { "80/tcp": {} },
  HostConfig: {
    NetworkMode: "lan", PortBindings: { "80/tcp": [{ HostIp: "127.0.0.1" }] },
    Mounts: [{ Type: "volume", Source: "data", Target: "/data" }],
  },
  NetworkingConfig: { EndpointsConfig: { lan: { Aliases: ["other"] } } },
});
const stream = await container.attach({ stream: true, stdin: true, stdout: true, stderr: true, hijack: true });
const [attached, through] = sink();
docker.modem.demuxStream(stream, attached, process.stderr);
await container.start();
while (!through().includes("ready")) await sleep(10);
const shown = await container.inspect();
seen.address = shown.NetworkSettings.Networks.lan.IPAddress.length > 0;
seen.port = Number(shown.NetworkSettings.Ports["80/tcp"][0].HostPort) > 0;

const exec = await container.exec({ Cmd: ["sh", "-c", "echo $A >&2; cat"], Env: ["A=b"], AttachStdin: true, AttachStdout: true, AttachStderr: true });
const inside = await exec.start({ hijack: true, stdin: true });
const [one, stdout] = sink();
const [two, stderr] = sink();
docker.modem.demuxStream(inside, one, two);
inside.end("typed");
await new Promise((resolve) => inside.on("end", resolve));
seen.exec = [stdout(), stderr(), (await exec.inspect()).ExitCode];

seen.stats = (await container.stats({ stream: false })).name;
seen.listed = (await docker.listContainers({ filters: { label: ["k=v"] } })).map((each) => each.Names);
seen.archive = (await buffer(await container.getArchive({ path: "/etc/passwd" }))).includes("root:x");
const events = await docker.getEvents({ filters: { type: ["container"], event: ["die"] } });
const died = new Promise((resolve) => events.on("data", (line) => resolve(JSON.parse(line).Actor.Attributes.exitCode)));
stream.end("last words");
seen.waited = (await container.wait()).StatusCode;
seen.events = await died;
events.destroy();
seen.logs = (await container.logs({ stdout: true, follow: false })).toString().includes("last words");
await container.remove({ v: true });
await network.remove();
await docker.getVolume("data").remove();

const build = await docker.buildImage({ context: path.join(here, "image"), src: ["Dockerfile"] }, { t: "made-by-dockerode:1" });
const steps = await new Promise((resolve, reject) => docker.modem.followProgress(build, (error, lines) => (error ? reject(error) : resolve(lines))));
seen.built = steps.at(-1).stream.trim();
const image = docker.getImage("made-by-dockerode:1");
seen.history = (await image.history()).length > 1;
await image.remove();
try {
  await docker.getContainer("nothing").inspect();
} catch (error) {
  seen.missing = [error.statusCode, error.json.message];
}
console.log(JSON.stringify(seen));
process.exit(0);
