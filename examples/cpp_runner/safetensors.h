// Reading a safetensors file into tensors by name.
#pragma once
#include <ATen/ops/from_blob.h>

#include <fstream>
#include <regex>
#include <sstream>

using Tensors = std::unordered_map<std::string, at::Tensor>;

inline std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, at);) parts.push_back(part);
  return parts;
}

// safetensors: length of the header, header {"name": {"dtype": .., "shape": [..], "data_offsets": [begin, end]}}, data; in the header
// {"__metadata__": {"decode:name": "other name"}} where a name of a program stands for another one's tensor
inline Tensors read(const std::string& path, std::unordered_map<std::string, std::string>* elsewhere = nullptr) {
  std::ifstream file(path, std::ios::binary);
  std::string all((std::istreambuf_iterator<char>(file)), {});
  const auto length = *reinterpret_cast<const uint64_t*>(all.data());
  const std::string header = all.substr(8, length);
  const std::regex entry(R"re("([^"]+)":\{"dtype":"(\w+)","shape":\[([\d,]*)\],"data_offsets":\[(\d+),\d+\]\})re");
  const std::unordered_map<std::string, at::ScalarType> types{
      {"F64", at::kDouble}, {"F32", at::kFloat}, {"BF16", at::kBFloat16}, {"F16", at::kHalf}, {"I64", at::kLong},
      {"I32", at::kInt},   {"I16", at::kShort}, {"I8", at::kChar},     {"U8", at::kByte},  {"BOOL", at::kBool}};
  Tensors tensors;
  for (std::sregex_iterator m(header.begin(), header.end(), entry), end; m != end; ++m) {
    std::vector<int64_t> shape;
    for (const auto& size : split((*m)[3], ',')) shape.push_back(std::stoll(size));
    tensors[(*m)[1]] = at::from_blob(all.data() + 8 + length + std::stoull((*m)[4]), shape, types.at((*m)[2])).clone();
  }
  const std::regex told(R"re("([^":]+:[^"]+)":"([^"]+)")re");
  for (std::sregex_iterator m(header.begin(), header.end(), told), end; elsewhere && m != end; ++m) (*elsewhere)[(*m)[1]] = (*m)[2];
  return tensors;
}
