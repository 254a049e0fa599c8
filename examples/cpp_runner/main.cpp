// Answers a question about images with a package of mmqc: vision, prefill, then decode, token by token.  No Python.
//
//   runner model.pt2 question.safetensors max_new_tokens end_token [weights.safetensors]    prints the ids of the answer's tokens
//
// The file holds the model's inputs by name, one row: input_ids, attention_mask, pixel_values, image_grid_thw, ...
// A package that was exported with weights= has them in a file of their own, once for all programs.
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iostream>

#include "safetensors.h"

using Program = torch::inductor::AOTIModelPackageLoader;

// A program takes its inputs from the tensors by name, and puts its outputs there.
void run(Program& program, Tensors& tensors) {
  auto metadata = program.get_metadata();
  std::vector<at::Tensor> inputs;
  for (const auto& name : split(metadata["inputs"], ',')) inputs.push_back(tensors.at(name));
  const auto outputs = program.run(inputs);
  const auto names = split(metadata["outputs"], ',');
  for (size_t i = 0; i < names.size(); ++i) tensors[names[i]] = outputs[i];
}

struct Weights {
  std::unordered_map<std::string, std::string> elsewhere;
  Tensors tensors;

  // The program keeps their addresses: they live as long as it does.
  void give(Program& program, const std::string& name) {
    std::unordered_map<std::string, at::Tensor> own;
    for (const auto& weight : program.get_constant_fqns()) {
      const auto at = elsewhere.find(name + ":" + weight);
      own[weight] = tensors.at(at == elsewhere.end() ? weight : at->second);
    }
    program.load_constants(own, /*use_inactive=*/false, /*check_full_update=*/true, /*user_managed=*/true);
  }
};

int main(int count, char** arguments) {
  if (count != 5 && count != 6)
    return std::cerr << "runner model.pt2 question.safetensors max_new_tokens end_token [weights.safetensors]\n", 2;
  setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 0);  // sizes and dtypes that do not fit are errors
  const std::string package = arguments[1];
  Tensors tensors = read(arguments[2]);
  const int64_t longest = std::stoll(arguments[3]), stop = std::stoll(arguments[4]);
  const int64_t length = tensors.at("input_ids").size(1), capacity = length + longest;

  Weights weights;
  if (count == 6) weights.tensors = read(arguments[5], &weights.elsewhere);
  Program vision(package, "vision"), prefill(package, "prefill"), decode(package, "decode");
  if (count == 6) weights.give(vision, "vision"), weights.give(prefill, "prefill"), weights.give(decode, "decode");
  auto facts = prefill.get_metadata();
  const auto cache = split(facts["cache"], ',');
  int64_t room = capacity;  // a quantized cache keeps visual tokens elsewhere
  for (const auto& id : split(facts["packed"], ','))
    room -= tensors["input_ids"].eq(std::stoll(id)).sum().item<int64_t>();
  const auto type = cache[0] == "float32" ? at::kFloat : cache[0] == "bfloat16" ? at::kBFloat16 : at::kHalf;
  for (size_t i = 1; i < cache.size(); ++i) {
    const auto part = split(cache[i], ':');
    tensors[part[0]] = at::zeros({1, std::stoll(part[1]), room, std::stoll(part[2])}, type);
  }
  run(vision, tensors);
  run(prefill, tensors);
  const auto mask = tensors.at("attention_mask");
  tensors["attention_mask"] = at::cat({mask, at::zeros({1, longest}, mask.options())}, 1);
  for (int64_t at = length; at <= capacity; ++at) {
    const auto token = tensors.at("logits").argmax(-1, true);
    std::cout << token.item<int64_t>() << std::endl;
    if (token.item<int64_t>() == stop || at == capacity - 1) break;
    tensors["input_ids"] = token;
    tensors["cache_position"] = at::full({1}, at, at::kLong);
    tensors["attention_mask"].select(1, at).fill_(1);
    run(decode, tensors);
  }
}
