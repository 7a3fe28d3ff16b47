//! Which elements of which parameter a rank holds, and which ranks hold the same.

use std::{collections::BTreeMap, ops::Range};

use crate::{
    mesh::{DeviceMesh, MeshAxis},
    model::{ModelSpec, ParameterKind, ParameterSpec},
};

/// What one rank holds of one parameter.
///
/// The parameter's gradient is the sum of what its replicas compute, each over its share of the batch, of the
/// sequence or of the heads; state that need be held once (masters, moments) may be split over them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// Index among `ModelSpec::parameters`.
    pub parameter: usize,
    /// Its elements in the flattened tensor, run after run, in order.
    pub runs: Vec<Range<usize>>,
    /// World ranks that hold these very elements, in order, the rank itself among them.
    pub replicas: Vec<usize>,
}

/// Where the parameters of a model lie on a mesh.
///
/// Pipeline stages hold their layers, the first the embedding, the last the final norm and the head, and both
/// a tied embedding. Tensor ranks hold whole heads, even shares of feed-forward widths, and rows of the
/// vocabulary that are as even as can be; norms and routers are whole on each, and a key/value head is on
/// several where there are fewer of them than ranks. Expert and expert-tensor ranks hold experts likewise. Data
/// and context ranks are replicas.
#[derive(Debug, Clone, Copy)]
pub struct Holdings<'a> {
    model: &'a ModelSpec,
    mesh: &'a DeviceMesh,
    stages: &'a [Range<usize>],
}

impl<'a> Holdings<'a> {
    /// Those of a model whose chunk i has the layers `stages[i]` and lies on stage `i % mesh.pipeline`.
    pub fn new(model: &'a ModelSpec, mesh: &'a DeviceMesh, stages: &'a [Range<usize>]) -> Self {
        Self {
            model,
            mesh,
            stages,
        }
    }

    /// What a rank holds, in the order of `ModelSpec::parameters`.
    pub fn of(&self, rank: usize) -> Vec<Holding> {
        self.model
            .parameters()
            .iter()
            .enumerate()
            .filter_map(|(index, spec)| self.holding(rank, index, spec))
            .collect()
    }

    /// What a rank holds of parameter `index`, if anything.
    pub fn holding(&self, rank: usize, index: usize, spec: &ParameterSpec) -> Option<Holding> {
        let shard = self.shard(rank, spec)?;
        let same = |r: &usize| self.shard(*r, spec) == Some(shard);
        Some(Holding {
            parameter: index,
            runs: self.runs(spec, shard),
            replicas: (0..self.mesh.world_size()).filter(same).collect(),
        })
    }

    /// Every part of parameter `index` with all its holders, by their first rank: together the whole tensor.
    pub fn parts(&self, index: usize, spec: &ParameterSpec) -> Vec<Holding> {
        let mut holders = BTreeMap::<usize, Vec<usize>>::new();
        for rank in 0..self.mesh.world_size() {
            if let Some(shard) = self.shard(rank, spec) {
                holders.entry(shard).or_default().push(rank);
            }
        }
        let mut parts: Vec<_> = holders
            .into_iter()
            .map(|(shard, replicas)| Holding {
                parameter: index,
                runs: self.runs(spec, shard),
                replicas,
            })
            .collect();
        parts.sort_by_key(|part| part.replicas[0]);
        parts
    }

    /// Which of the parameter's shards a rank holds.
    fn shard(&self, rank: usize, spec: &ParameterSpec) -> Option<usize> {
        let at = |axis| self.mesh.coordinate(rank, axis);
        let stage = at(MeshAxis::Pipeline);
        if !self.stages_of(spec).any(|s| s == stage) {
            return None;
        }
        if let (Some(expert), Some(moe)) = (spec.expert, self.model.moe) {
            let owner = expert / (moe.num_experts / self.mesh.expert).max(1);
            return (owner == at(MeshAxis::Expert)).then(|| at(MeshAxis::ExpertTensor));
        }
        Some(at(MeshAxis::Tensor) * self.shards(spec) / self.mesh.tensor)
    }

    fn stages_of(&self, spec: &ParameterSpec) -> impl Iterator<Item = usize> {
        let last = self.stages.len().saturating_sub(1);
        let chunks = match (spec.layer, spec.kind) {
            (Some(layer), _) => {
                let chunk = self.stages.iter().position(|s| s.contains(&layer));
                [chunk, None]
            }
            (None, ParameterKind::Embedding) => {
                [Some(0), self.model.tied_embeddings.then_some(last)]
            }
            (None, _) => [Some(last), None],
        };
        let pipeline = self.mesh.pipeline;
        chunks.into_iter().flatten().map(move |c| c % pipeline)
    }

    /// In how many shards the parameter lies over the tensor ranks.
    fn shards(&self, spec: &ParameterSpec) -> usize {
        let tensor = match spec.expert {
            Some(_) => self.mesh.expert_tensor,
            None => self.mesh.tensor,
        };
        match spec.kind {
            ParameterKind::Norm | ParameterKind::HeadNorm | ParameterKind::Router => 1,
            ParameterKind::KeyValueLinear | ParameterKind::KeyValueBias => {
                tensor.min(self.model.num_kv_heads)
            }
            _ => tensor,
        }
    }

    fn runs(&self, spec: &ParameterSpec, shard: usize) -> Vec<Range<usize>> {
        let shards = self.shards(spec);
        let rows = spec.shape.first().copied().unwrap_or(1);
        let width: usize = spec.shape.iter().skip(1).product();
        match spec.kind {
            ParameterKind::RowLinear if shards > 1 => {
                let columns = share(width, shards, shard);
                (0..rows)
                    .map(|row| row * width + columns.start..row * width + columns.end)
                    .collect()
            }
            _ => {
                let rows = share(rows, shards, shard);
                vec![rows.start * width..rows.end * width]
            }
        }
    }
}

/// Part `index` of `0..len` cut into `parts`, as even as can be.
pub fn share(len: usize, parts: usize, index: usize) -> Range<usize> {
    len * index / parts..len * (index + 1) / parts
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn model(kv_heads: usize, tied: bool, moe: bool) -> ModelSpec {
        let config = serde_json::json!({
            "model_type": if moe { "mixtral" } else { "llama" }, "vocab_size": 97, "hidden_size": 32,
            "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8,
            "num_key_value_heads": kv_heads, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": tied, "num_local_experts": 4, "num_experts_per_tok": 2,
        });
        ModelSpec::from_hf_config(&config.to_string(), Path::new("config.json")).unwrap()
    }

    /// Every element has exactly one set of holders, and its holders agree on who they are.
    fn check(model: &ModelSpec, mesh: &DeviceMesh, stages: &[Range<usize>]) {
        let holdings = Holdings::new(model, mesh, stages);
        let parameters = model.parameters();
        let mut seen: Vec<BTreeMap<Vec<usize>, Vec<Range<usize>>>> =
            vec![BTreeMap::new(); parameters.len()];
        for rank in 0..mesh.world_size() {
            for holding in holdings.of(rank) {
                assert!(holding.replicas.contains(&rank));
                let known = seen[holding.parameter]
                    .entry(holding.replicas)
                    .or_insert_with(|| holding.runs.clone());
                assert_eq!(*known, holding.runs);
            }
        }
        for (index, (spec, sets)) in parameters.iter().zip(seen).enumerate() {
            let parts = holdings.parts(index, spec);
            assert_eq!(parts.len(), sets.len());
            assert!(parts.iter().all(|p| sets.get(&p.replicas) == Some(&p.runs)));
            let mut runs: Vec<_> = sets
                .into_values()
                .flatten()
                .filter(|r| !r.is_empty())
                .collect();
            runs.sort_by_key(|r| r.start);
            let end = runs.iter().fold(0, |end, run| {
                assert_eq!(run.start, end, "{} on {mesh:?}", spec.name);
                run.end
            });
            assert_eq!(end, spec.num_elements(), "{} on {mesh:?}", spec.name);
        }
    }

    #[test]
    fn every_element_has_one_set_of_holders_on_every_mesh() {
        for (pipeline, data_shard, context, tensor) in [
            (1, 1, 1, 1),
            (1, 2, 2, 4),
            (2, 1, 1, 8),
            (4, 2, 1, 2),
            (2, 2, 2, 1),
        ] {
            for (expert, expert_tensor) in [(1, tensor), (2, 1), (4, 1), (2, 2)] {
                let mesh = DeviceMesh {
                    pipeline,
                    data_shard,
                    context,
                    tensor,
                    expert,
                    expert_tensor,
                    ..DeviceMesh::default()
                };
                let fits = mesh.stage_size().is_multiple_of(expert * expert_tensor);
                let chunk = 4 / pipeline;
                let stages: Vec<_> = (0..pipeline).map(|i| i * chunk..(i + 1) * chunk).collect();
                for kv_heads in [1, 2, 8] {
                    for tied in [false, true] {
                        check(&model(kv_heads, tied, false), &mesh, &stages);
                        if fits {
                            check(&model(kv_heads, tied, true), &mesh, &stages);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn interleaved_chunks_go_round_the_stages() {
        let mesh = DeviceMesh {
            pipeline: 2,
            ..DeviceMesh::default()
        };
        let stages: Vec<_> = (0..4).map(|i| i..i + 1).collect();
        let model = model(2, true, false);
        check(&model, &mesh, &stages);
        let layers = |rank| {
            let mut layers: Vec<_> = Holdings::new(&model, &mesh, &stages)
                .of(rank)
                .iter()
                .filter_map(|h| model.parameters()[h.parameter].layer)
                .collect();
            layers.dedup();
            layers
        };
        assert_eq!((layers(0), layers(1)), (vec![0, 2], vec![1, 3]));
    }

    #[test]
    fn fewer_key_value_heads_than_ranks_are_shared_by_neighbours() {
        let mesh = DeviceMesh {
            tensor: 4,
            ..DeviceMesh::default()
        };
        let model = model(2, false, false);
        let stages = [0..4];
        let parameters = model.parameters();
        let index = parameters
            .iter()
            .position(|p| p.name.ends_with("0.self_attn.k_proj.weight"))
            .unwrap();
        let holdings = Holdings::new(&model, &mesh, &stages);
        let of = |rank| holdings.holding(rank, index, &parameters[index]).unwrap();
        // Two heads of 4 rows of 32.
        assert_eq!(of(1).runs, [0..128]);
        assert_eq!(of(1).replicas, [0, 1]);
        assert_eq!(of(2).runs, [128..256]);
        assert_eq!(of(2).replicas, [2, 3]);
    }
}
