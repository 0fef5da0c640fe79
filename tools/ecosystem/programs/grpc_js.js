// A stream as Node's own gRPC library opens it.
const fs = require('fs');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const definition = loader.loadFileDescriptorSetFromBuffer(fs.readFileSync(process.env.PROTOCOL), {keepCase: true});
const {GRPCInferenceService} = grpc.loadPackageDefinition(definition).inference;
const client = new GRPCInferenceService(process.env.GRPC, grpc.credentials.createInsecure());

function bytes(text) {
  const length = Buffer.alloc(4);
  length.writeUInt32LE(Buffer.byteLength(text));
  return Buffer.concat([length, Buffer.from(text)]);
}

function fail(error) {
  console.log(error);
  process.exit(1);
}

let text = '';
const stream = client.ModelStreamInfer();
stream.on('error', fail);
stream.on('data', ({error_message, infer_response}) => {
  if (error_message) fail(error_message);
  const at = infer_response.outputs.findIndex(({name}) => name === 'text_output');
  if (at >= 0) text += infer_response.raw_output_contents[at].subarray(4).toString();
  const final = infer_response.parameters.find(({key}) => key === 'triton_final_response');
  if (final && final.value.bool_param) {
    console.log(JSON.stringify(text));
    stream.end();
  }
});
stream.write({
  model_name: 'vllm_model',
  inputs: [
    {name: 'text_input', datatype: 'BYTES', shape: [1]},
    {name: 'stream', datatype: 'BOOL', shape: [1]},
    {name: 'sampling_parameters', datatype: 'BYTES', shape: [1]},
  ],
  raw_input_contents: [bytes('1, 2, 3,'), Buffer.from([1]), bytes('{"max_tokens": "5", "temperature": "0"}')],
  parameters: [{key: 'triton_enable_empty_final_response', value: {bool_param: true}}],
});
