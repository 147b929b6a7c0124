// Runs one function of a client's program: node runner.mjs PROGRAM FUNCTION SERVER
const [program, name, server] = process.argv.slice(2);
const found = await import(program);
await found[name](JSON.parse(server));
process.exit(0); // connections that are kept alive would hold the process
