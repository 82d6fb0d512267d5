// Streams a completion and the answer of a chat, aborts a completion, and reads what a refusal says.
//
//     npm start HOST:PORT [CA_FILE TOKEN_FILE]
//
// With CA_FILE and TOKEN_FILE the calls go through TLS and carry the token.

import { readFileSync } from "node:fs";
import { credentials, Metadata, status as codes, type ServiceError } from "@grpc/grpc-js";
import { BadRequest, ErrorInfo, RetryInfo } from "./stubs/google/rpc/error_details.js";
import { Status } from "./stubs/google/rpc/status.js";
import { abortOutcomeToJSON, AbortRequest, type AbortResponse } from "./stubs/runahead/v1/control.js";
import { finishReasonToJSON, GenerateRequest } from "./stubs/runahead/v1/generate.js";
import { GenerationServiceClient } from "./stubs/runahead/v1/generation_service.js";

// Calls are spread over the servers behind a name, and made again after UNAVAILABLE alone, by gRPC itself.
const serviceConfig = {
  loadBalancingConfig: [{ round_robin: {} }],
  methodConfig: [
    {
      name: [{ service: "runahead.v1.GenerationService" }],
      retryPolicy: {
        maxAttempts: 4,
        initialBackoff: "0.1s",
        maxBackoff: "2s",
        backoffMultiplier: 2,
        retryableStatusCodes: ["UNAVAILABLE"],
      },
    },
  ],
};

function connect(address: string, caFile?: string, tokenFile?: string): GenerationServiceClient {
  const options = { "grpc.service_config": JSON.stringify(serviceConfig) };
  if (!caFile || !tokenFile) {
    return new GenerationServiceClient(address, credentials.createInsecure(), options);
  }
  const token = readFileSync(tokenFile, "utf8").trim();
  const bearer = credentials.createFromMetadataGenerator((_, done) => {
    const metadata = new Metadata();
    metadata.set("authorization", `Bearer ${token}`);
    done(null, metadata);
  });
  const tls = credentials.createSsl(readFileSync(caFile));
  return new GenerationServiceClient(address, credentials.combineChannelCredentials(tls, bearer), options);
}

const withinAMinute = () => ({ deadline: Date.now() + 60_000 });

const completion = GenerateRequest.fromPartial({
  prompt: { $case: "text", value: "def read_lines(path):\n" },
  sampling: { temperature: 0 },
  stopping: { maxTokens: 32 },
});

// The server makes a prompt of the messages, with the model's chat template.
const question = GenerateRequest.fromPartial({
  prompt: {
    $case: "chat",
    value: {
      messages: [
        { role: "system", content: "Answer in one sentence." },
        { role: "user", content: "How does Python read the lines of a file?" },
      ],
    },
  },
  sampling: { temperature: 0 },
  stopping: { maxTokens: 32 },
});

// Prints text as it arrives: `accepted` comes first, then deltas, and `finished` last.
async function stream(service: GenerationServiceClient, request: GenerateRequest): Promise<void> {
  for await (const { event } of service.generate(request, withinAMinute())) {
    if (event.$case === "delta") {
      process.stdout.write(event.value.text);
    } else if (event.$case === "finished") {
      const { reason, usage } = event.value;
      console.log(`\nfinished: ${finishReasonToJSON(reason)}, ${usage?.completionTokens} tokens`);
    }
  }
}

// Streams the answer of a chat. A model without a chat template takes none.
async function chat(service: GenerationServiceClient): Promise<void> {
  try {
    await stream(service, question);
  } catch (error) {
    explain(error as ServiceError);
  }
}

// Ends a stream by its id, as another process could. To end one's own, `call.cancel()` does.
async function abort(service: GenerationServiceClient): Promise<void> {
  const request = GenerateRequest.fromPartial({
    prompt: { $case: "text", value: "def main():\n" },
    stopping: { maxTokens: 2000, ignoreEos: true },
  });
  let requestId = "";
  for await (const { event } of service.generate(request, withinAMinute())) {
    if (event.$case === "accepted") {
      requestId = event.value.requestId;
    } else if (event.$case === "delta" && requestId) {
      const answer = await abortById(service, requestId);
      console.log(`abort: ${abortOutcomeToJSON(answer.results[0].outcome)}`);
      requestId = ""; // once is enough; what was on its way still arrives
    } else if (event.$case === "finished") {
      console.log(`finished: ${finishReasonToJSON(event.value.reason)}`);
    }
  }
}

// A call with one answer takes a callback; this makes a promise of it.
function abortById(service: GenerationServiceClient, requestId: string): Promise<AbortResponse> {
  const request = AbortRequest.fromPartial({ requestIds: [requestId] });
  return new Promise((resolve, reject) => {
    service.abort(request, new Metadata(), withinAMinute(), (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

// Asks for what no server gives.
async function refused(service: GenerationServiceClient): Promise<void> {
  const request = GenerateRequest.fromPartial({ prompt: { $case: "text", value: "x" }, stopping: { maxTokens: 0 } });
  try {
    for await (const _ of service.generate(request, withinAMinute())) {
      // Nothing comes.
    }
  } catch (error) {
    explain(error as ServiceError);
  }
}

// Prints an error's code and sentence, and the details that say what to do about it.
function explain(error: ServiceError): void {
  console.log(`refused: ${codes[error.code]}: ${error.details}`);
  const [packed] = error.metadata?.get("grpc-status-details-bin") ?? []; // google.rpc.Status
  for (const detail of packed ? Status.decode(packed as Buffer).details : []) {
    switch (detail.typeUrl) {
      case "type.googleapis.com/google.rpc.ErrorInfo": {
        const { reason, domain } = ErrorInfo.decode(detail.value);
        console.log(`  reason ${reason} of ${domain}`);
        break;
      }
      case "type.googleapis.com/google.rpc.BadRequest":
        for (const { field, description } of BadRequest.decode(detail.value).fieldViolations) {
          console.log(`  field ${field}: ${description}`);
        }
        break;
      case "type.googleapis.com/google.rpc.RetryInfo": {
        const { seconds = 0n, nanos = 0 } = RetryInfo.decode(detail.value).retryDelay ?? {};
        console.log(`  try again in ${(Number(seconds) + nanos / 1e9).toFixed(1)} s`);
        break;
      }
    }
  }
}

const [address, caFile, tokenFile] = process.argv.slice(2);
const service = connect(address, caFile, tokenFile);
try {
  await stream(service, completion);
  await chat(service);
  await abort(service);
  await refused(service);
} catch (error) {
  explain(error as ServiceError);
  process.exitCode = 1;
} finally {
  service.close();
}
