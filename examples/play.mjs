// Plays one episode on a server over HTTP, with random legal moves.
//
//     envkit serve
//     node examples/play.mjs http://127.0.0.1:8000 FrozenLake-v0 7
//
// If the server needs a token, set the environment variable ENVKIT_TOKEN.

const [url = "http://127.0.0.1:8000", envId = "FrozenLake-v0", seed = "1"] = process.argv.slice(2);
const headers = { "content-type": "application/json" };
if (process.env.ENVKIT_TOKEN) {
  headers.authorization = `Bearer ${process.env.ENVKIT_TOKEN}`;
}

// Sends a request, and repeats it while the server asks for that: status 202 means that a reset is still running, and the
// field `retry` that the server has no capacity now. Every request of the API is safe to repeat.
async function call(method, path, body) {
  for (;;) {
    const response = await fetch(url + path, { method, headers, body: body && JSON.stringify(body) });
    const reply = await response.json();
    if (response.ok && response.status !== 202) {
      return reply;
    }
    if (response.status !== 202 && !reply.retry) {
      throw new Error(`${method} ${path}: ${reply.detail}`);
    }
    const seconds = Number(response.headers.get("retry-after") ?? 1);
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
  }
}

const session = `/v1/sessions/js-${process.pid}-${Date.now()}`;
let reply = await call("PUT", session, { env_id: envId, seed: Number(seed) });
let total = 0;
try {
  do {
    console.log(reply.observation);
    const moves = reply.legal_moves;
    const move = moves[Math.floor(Math.random() * moves.length)];
    console.log(`> ${move}\n`);
    reply = await call("POST", `${session}/step`, { turn: reply.turn, action: `<answer>${move}</answer>` });
    total += reply.reward;
  } while (!reply.terminated && !reply.truncated);
  console.log(reply.observation);
  console.log(`reward ${total} after ${reply.turn} steps`);
} finally {
  await call("DELETE", session);
}
