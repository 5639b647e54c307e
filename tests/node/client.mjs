// A client of multigpu made from nothing but the .proto files. `node client.mjs HOST:PORT` tries every call that a client
// needs and prints what it saw as one JSON object.
import { randomUUID } from "node:crypto";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const protos = fileURLToPath(new URL("../../protos", import.meta.url));
// Numbers for 64-bit fields: task ids stay below 2^53 so that they fit.
const definition = protoLoader.loadSync("multigpu/v1/task_service.proto", {
  includeDirs: [protos], longs: Number, enums: String, defaults: true, oneofs: true,
});
const { TaskService } = grpc.loadPackageDefinition(definition).multigpu.v1;
const client = new TaskService(process.argv[2], grpc.credentials.createInsecure(), {
  "grpc.max_receive_message_length": 64 * 1024 * 1024,
});

const unary = (method, request) =>
  new Promise((resolve, reject) => {
    client[method](request, { deadline: Date.now() + 20_000 }, (error, response) => (error ? reject(error) : resolve(response)));
  });

// Runs tasks on one stream. `onFrame` sees each answer, and the stream to say more on; ends when all have an answer.
const run = (batches, onFrame = () => {}) =>
  new Promise((resolve, reject) => {
    const waiting = new Set(batches.flatMap((batch) => batch.inputs.map((input) => input.requestId)));
    const outcomes = [];
    const rejected = [];
    const stream = client.Run({ deadline: Date.now() + 20_000 });
    stream.on("error", reject);
    stream.on("end", () => resolve({ outcomes, rejected }));
    stream.on("data", (frame) => {
      outcomes.push(...frame.outcomes);
      rejected.push(...frame.rejected);
      for (const answer of [...frame.outcomes, ...frame.rejected]) waiting.delete(answer.requestId);
      onFrame(frame, stream);
      if (waiting.size === 0) stream.end();
    });
    for (const batch of batches) stream.write({ batches: [batch] });
  });

const task = (payload) => ({ requestId: randomUUID(), payload: Buffer.from(payload) });

async function runMany() {
  const inputs = Array.from({ length: 500 }, (_, n) => task(`payload ${n}`));
  const batches = [inputs.slice(0, 250), inputs.slice(250)].map((some) => ({ spec: { kind: "echo" }, inputs: some }));
  const { outcomes } = await run(batches);
  const results = new Map(outcomes.map((outcome) => [outcome.requestId, outcome.result.toString()]));
  return {
    outcomes: outcomes.length,
    right: inputs.filter((input) => results.get(input.requestId) === input.payload.toString()).length,
    safeIds: outcomes.every((outcome) => Number.isSafeInteger(outcome.taskId) && outcome.taskId > 0),
  };
}

async function runPartials() {
  const parts = [];
  const batch = { spec: { kind: "trial.stream", parameters: { count: "3" } }, inputs: [task("p")] };
  const { outcomes } = await run([batch], (frame) => parts.push(...frame.partials));
  return { parts: parts.map((part) => [part.index, part.data.toString()]), result: outcomes[0].result.toString() };
}

async function runAndCancel() {
  const input = task("60");
  const { outcomes } = await run([{ spec: { kind: "sleep" }, inputs: [input] }], (frame, stream) => {
    if (frame.accepted.length > 0) stream.write({ cancelRequestIds: [input.requestId] });
  });
  return { state: outcomes[0].state, error: outcomes[0].error.type };
}

async function runRejected() {
  const { rejected } = await run([{ spec: { kind: "no.such.kind" }, inputs: [task("x")] }]);
  return { code: rejected[0].code, message: rejected[0].message };
}

// Reads outcomes of a queue after a cursor until `count` have come; the cursor to go on from.
const watch = (queue, cursor, count) =>
  new Promise((resolve, reject) => {
    const stream = client.Watch({ queue, cursor }, { deadline: Date.now() + 20_000 });
    const seen = [];
    stream.on("error", (error) => error.code !== grpc.status.CANCELLED && reject(error));
    stream.on("data", (frame) => {
      seen.push(...frame.outcomes.map((outcome) => outcome.result.toString()));
      if (seen.length >= count) {
        stream.cancel();
        resolve({ seen, cursor: frame.cursor });
      }
    });
  });

async function submitGetWatch() {
  const queue = `node-${randomUUID()}`;
  const submit = (...payloads) =>
    unary("Submit", { batches: [{ spec: { kind: "echo", queue }, inputs: payloads.map((p) => ({ payload: Buffer.from(p) })) }] });
  const first = await submit("a", "b", "c");
  const { task: got } = await unary("Get", { taskId: first.results[0].taskId, wait: { seconds: 10 } });
  const before = await watch(queue, "", 3);
  await submit("d");
  const after = await watch(queue, before.cursor, 1);
  return { state: got.state, result: got.outcome.result.toString(), before: before.seen.sort(), after: after.seen };
}

async function submitAndCancel() {
  const { results } = await unary("Submit", { batches: [{ spec: { kind: "sleep" }, inputs: [{ payload: Buffer.from("60") }] }] });
  const taskIds = [results[0].taskId];
  const cancelled = await unary("Cancel", { taskIds, reason: "enough" });
  const { task: got } = await unary("Get", { taskId: taskIds[0], wait: { seconds: 10 } });
  return { cancelled: cancelled.cancelledTaskIds.length, state: got.outcome.state, message: got.outcome.error.message };
}

async function rejected() {
  const error = await unary("Get", { taskId: 1 }).catch((thrown) => thrown);
  return { code: error.code, details: error.details };
}

const trials = { runMany, runPartials, runAndCancel, runRejected, submitGetWatch, submitAndCancel, rejected };
const report = {};
for (const [name, trial] of Object.entries(trials)) report[name] = await trial();
console.log(JSON.stringify(report));
client.close();
