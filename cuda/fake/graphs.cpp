// Graphs: captured work does not run. It runs at each launch of the graph, with the parameters of
// its capture.
#include "state.hpp"

namespace fake {

namespace {

std::set<Graph*>& graphs() {
  static auto* all = new std::set<Graph*>;
  return *all;
}
// A graph and its executable are the same here, but each is destroyed by itself.
template <class Handle> Handle keep(std::unique_ptr<Graph> graph) {
  graphs().insert(graph.get());
  return reinterpret_cast<Handle>(graph.release());
}
Graph* find_graph(const void* handle) {
  const auto found = graphs().find(static_cast<Graph*>(const_cast<void*>(handle)));
  return found == graphs().end() ? nullptr : *found;
}
CUresult forget(const void* handle) {
  Graph* graph = find_graph(handle);
  if (!graph) return CUDA_ERROR_INVALID_HANDLE;
  graphs().erase(graph);
  delete graph;
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace fake

using namespace fake;

EXPORTED CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode) {
  ENTER_CONTEXT;
  Stream* stream = find_stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (!handle || handle == CU_STREAM_LEGACY) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream->captured) return CUDA_ERROR_ILLEGAL_STATE;
  stream->captured = std::make_unique<Graph>();
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuStreamEndCapture(CUstream handle, CUgraph* to) {
  ENTER_CONTEXT;
  Stream* stream = find_stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (!stream->captured) return CUDA_ERROR_ILLEGAL_STATE;
  *to = keep<CUgraph>(std::move(stream->captured));
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuGraphInstantiate(CUgraphExec* to, CUgraph handle, unsigned long long flags) {
  ENTER_CONTEXT;
  const Graph* graph = find_graph(handle);
  if (!graph || flags) return CUDA_ERROR_INVALID_VALUE;
  *to = keep<CUgraphExec>(std::make_unique<Graph>(*graph));
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuGraphLaunch(CUgraphExec handle, CUstream to) {
  ENTER_CONTEXT;
  const Graph* graph = find_graph(handle);
  Stream* stream = find_stream(to);
  if (!graph || !stream) return CUDA_ERROR_INVALID_HANDLE;
  enqueue(*stream, [steps = graph->steps] {
    for (const auto& step : steps)
      if (CUresult wrong = step()) return wrong;
    return CUDA_SUCCESS;
  });
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuGraphDestroy(CUgraph handle) {
  ENTER_CONTEXT;
  return forget(handle);
}
EXPORTED CUresult cuGraphExecDestroy(CUgraphExec handle) {
  ENTER_CONTEXT;
  return forget(handle);
}
