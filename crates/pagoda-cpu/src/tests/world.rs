//! Random caches, and attention over them written down as plainly as possible in f64.

use super::samples::Random;
use crate::{
    Arenas, Attention, Backend, Carried, DerivedKeys, Element, Layer, PagedKv, Rope, Rows, RowsMut,
    SequenceTable, Shared, Transform, decode_row, encode_row,
};
use half::{bf16, f16};
use pagoda_core::common::{Candidate, Commons};
use pagoda_core::ids::{BlockId, BlockRef, Tier};
use pagoda_core::layout::{BlockLayout, LayerGeometry, RowFormat};
use pagoda_core::table::{Sight, SpanView};
use pagoda_core::work;

pub(crate) const ELEMENTS: [Element; 3] = [Element::F32, Element::F16, Element::Bf16];

/// What is left of a row of numbers in a format.
pub(crate) fn through(x: &[f32], format: RowFormat) -> Vec<f32> {
    match format {
        RowFormat::F32 => x.to_vec(),
        RowFormat::F16 => x.iter().map(|&x| f16::from_f32(x).to_f32()).collect(),
        RowFormat::Bf16 => x.iter().map(|&x| bf16::from_f32(x).to_f32()).collect(),
        _ => {
            let size = |bytes: u64| vec![0u8; bytes as usize];
            let mut rows = size(format.row_bytes(x.len() as u32));
            let mut scales = size(format.scale_bytes(x.len() as u32));
            assert!(encode_row(format, x, &mut rows, &mut scales));
            let mut result = vec![0.0; x.len()];
            decode_row(format, &rows, &scales, &mut result);
            result
        }
    }
}

pub(crate) fn encode(x: &[f32], element: Element) -> Vec<u8> {
    match element {
        Element::F32 => x.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        Element::F16 => x.iter().flat_map(|&x| f16::from_f32(x).to_ne_bytes()).collect(),
        Element::Bf16 => x.iter().flat_map(|&x| bf16::from_f32(x).to_ne_bytes()).collect(),
    }
}

pub(crate) fn decode(bytes: &[u8], element: Element) -> Vec<f32> {
    let words = || bytes.chunks_exact(2).map(|b| u16::from_ne_bytes([b[0], b[1]]));
    match element {
        Element::F32 => bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Element::F16 => words().map(|w| f16::from_bits(w).to_f32()).collect(),
        Element::Bf16 => words().map(|w| bf16::from_bits(w).to_f32()).collect(),
    }
}

/// What is left of numbers that were given in an element type.
fn given(x: &[f32], element: Element) -> Vec<f32> {
    decode(&encode(x, element), element)
}

/// A sequence with everything that was ever said about it.
#[derive(Clone)]
pub(crate) struct Sequence {
    pub(crate) row: Vec<BlockRef>,
    pub(crate) spans: Vec<SpanView>,
    /// `[token][kv_head][dim]`, as given to `append`.
    pub(crate) keys: Vec<f32>,
    pub(crate) values: Vec<f32>,
    /// `[token][q_head][dim]`, for every token.
    pub(crate) queries: Vec<f32>,
}

impl Sequence {
    pub(crate) fn len(&self) -> usize {
        self.spans.iter().map(|s| s.count as usize).sum()
    }
    /// The spans of the first `n` tokens.
    pub(crate) fn prefix(&self, n: usize) -> Vec<SpanView> {
        let mut left = n;
        let mut spans = self.spans.clone();
        for span in &mut spans {
            span.count = (span.count as usize).min(left) as u32;
            left -= span.count as usize;
        }
        spans.retain(|s| s.count > 0);
        spans
    }
}

/// Arenas full of NaN, a layer, and sequences to store.
pub(crate) struct World {
    pub(crate) layer: Layer,
    /// A logit for each query head.
    pub(crate) sinks: Option<Vec<f32>>,
    /// What values are multiplied with, where keys are derived.
    weight: Option<Vec<f32>>,
    memory: [Vec<u64>; 2],
    free: Vec<BlockRef>,
    pub(crate) sequences: Vec<Sequence>,
}

/// How a sequence is cut: `(skip or shared, count, offset)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    /// Continue in the page where the span before ended.
    pub(crate) shared: bool,
    pub(crate) skip: usize,
    pub(crate) count: usize,
    pub(crate) offset: u64,
    pub(crate) sight: Sight,
}

impl World {
    /// `layers_before` layers precede ours in the block.
    pub(crate) fn new(
        random: &mut Random,
        geometry: LayerGeometry,
        num_q_heads: u32,
        page_size: u32,
        blocks: u32,
    ) -> Self {
        let before = random.below(3);
        let layout = BlockLayout::new(&vec![geometry; before + 1], page_size);
        let layer = Layer {
            geometry,
            layout: layout.layers[before],
            block_bytes: layout.block_bytes,
            page_size,
            num_q_heads,
            scale: 1.0 / (geometry.head_dim as f32).sqrt(),
            softcap: None,
            window: None,
            rope: None,
            transform: Transform::default(),
            derived: None,
        };
        let words = (layout.block_bytes as usize * blocks as usize).div_ceil(8);
        let mut free: Vec<_> = [Tier::Device, Tier::Host]
            .into_iter()
            .flat_map(|tier| (0..blocks).map(move |i| BlockRef::new(tier, BlockId::new(i))))
            .collect();
        for i in (1..free.len()).rev() {
            free.swap(i, random.below(i + 1));
        }
        Self {
            layer,
            sinks: None,
            weight: None,
            memory: [vec![!0; words], vec![!0; words]],
            free,
            sequences: Vec::new(),
        }
    }

    /// Keys come from values, which are stored in their place.
    pub(crate) fn derive_keys(&mut self, random: &mut Random) {
        let weight = random.normals(self.layer.geometry.head_dim as usize);
        self.layer.derived = Some(DerivedKeys::new(&weight, self.layer.rope.as_ref()));
        self.weight = Some(weight);
    }

    pub(crate) fn arenas(&mut self) -> Arenas {
        let [device, host] = &mut self.memory;
        Arenas::new(device.as_mut_ptr().cast(), host.as_mut_ptr().cast())
    }

    pub(crate) fn bytes(&self, block: BlockRef) -> &[u8] {
        let memory = &self.memory[block.tier().index()];
        // SAFETY: any bytes will do.
        let bytes = unsafe { std::slice::from_raw_parts(memory.as_ptr().cast::<u8>(), memory.len() * 8) };
        let size = self.layer.block_bytes as usize;
        &bytes[block.block().index() as usize * size..][..size]
    }

    /// Adds a sequence with random contents.
    pub(crate) fn add(&mut self, random: &mut Random, cuts: &[Cut]) {
        let page = self.layer.page_size as usize;
        let mut row = Vec::new();
        let mut spans: Vec<SpanView> = Vec::new();
        for cut in cuts {
            let (mut first_page, mut skip) = (row.len(), cut.skip);
            if let (true, Some(last)) = (cut.shared, spans.last()) {
                let end = (last.skip + last.count) as usize;
                if !end.is_multiple_of(page) {
                    (first_page, skip) = (row.len() - 1, end % page);
                }
            }
            let pages = (skip + cut.count).div_ceil(page);
            while row.len() < first_page + pages {
                row.push(self.free.pop().expect("enough blocks"));
            }
            spans.push(SpanView {
                first_page: first_page as u32,
                skip: skip as u32,
                count: cut.count as u32,
                position: (skip + random.below(100_000)) as u64,
                offset: cut.offset,
                sight: cut.sight,
            });
        }
        let len: usize = cuts.iter().map(|cut| cut.count).sum();
        // Rows go on with entries that must not be followed.
        for _ in 0..random.below(3) {
            row.push(BlockRef::new(Tier::Disk, BlockId::new(1 << 29)));
        }
        let LayerGeometry { num_kv_heads, head_dim, v_head_dim, v_format, .. } = self.layer.geometry;
        let mut keys = random.normals(len * (num_kv_heads * head_dim) as usize);
        // Keys lie about their centre, as a mean is.
        let center = &self.layer.transform.center;
        keys.iter_mut().zip(center.iter().cycle()).for_each(|(x, c)| *x += c);
        let values = match v_format {
            Some(_) => random.normals(len * (num_kv_heads * v_head_dim) as usize),
            None => keys
                .chunks_exact(head_dim as usize)
                .flat_map(|k| &k[..v_head_dim as usize])
                .copied()
                .collect(),
        };
        self.sequences.push(Sequence {
            row,
            spans,
            keys,
            values,
            queries: random.normals(len * (self.layer.num_q_heads * head_dim) as usize),
        });
    }

    /// Moves every page to other blocks of other tiers.
    pub(crate) fn shuffle(&mut self, random: &mut Random) {
        for s in 0..self.sequences.len() {
            for p in 0..self.sequences[s].row.len() {
                let old = self.sequences[s].row[p];
                if old.tier() == Tier::Disk {
                    continue;
                }
                let i = random.below(self.free.len());
                let new = std::mem::replace(&mut self.free[i], old);
                let bytes = self.bytes(old).to_vec();
                let size = bytes.len();
                let memory = self.memory[new.tier().index()].as_mut_ptr().cast::<u8>();
                // SAFETY: blocks lie within the arenas.
                unsafe {
                    let target = memory.add(new.block().index() as usize * size);
                    target.copy_from_nonoverlapping(bytes.as_ptr(), size);
                }
                self.sequences[s].row[p] = new;
            }
        }
    }

    /// Stores all tokens of all sequences.
    pub(crate) fn fill(&mut self, backend: &Backend, element: Element) {
        let arenas = self.arenas();
        let LayerGeometry { num_kv_heads, head_dim, v_head_dim, .. } = self.layer.geometry;
        let tables: Vec<_> = self
            .sequences
            .iter()
            .map(|s| SequenceTable { row: &s.row, spans: &s.spans, new_tokens: s.len() as u32 })
            .collect();
        let join = |f: fn(&Sequence) -> &Vec<f32>| {
            encode(&self.sequences.iter().flat_map(|s| f(s).iter().copied()).collect::<Vec<_>>(), element)
        };
        let (keys, values) = (join(|s| &s.keys), join(|s| &s.values));
        let (keys, values) = (
            rows(&keys, element, num_kv_heads as usize, head_dim as usize),
            self.layer
                .geometry
                .v_format
                .map(|_| rows(&values, element, num_kv_heads as usize, v_head_dim as usize)),
        );
        let kv = PagedKv { arenas: &arenas, layer: &self.layer, sequences: &tables };
        // SAFETY: the tables are this world's, and the arrays have a row for every token.
        unsafe { backend.append(&kv, keys, values, true) }.expect("append");
    }

    /// Attention of the tokens `len - new..len` of some sequences: outputs and log-sum-exps.
    pub(crate) fn attend(
        &mut self,
        backend: &Backend,
        batch: &[(usize, usize, usize)],
        element: Element,
    ) -> (Vec<f32>, Vec<f32>) {
        let whole = |attention: &Attention<'_>| {
            // SAFETY: the tables are this world's, and the arrays have a row for every token.
            unsafe { backend.attend(attention) }.expect("attend");
        };
        self.attend_by(whole, batch, element)
    }

    /// The same of one sequence, run by run or a few at a time. Meanwhile the pages of other runs are not in memory, and of
    /// some pages only this layer is, as after a read from disk.
    pub(crate) fn attend_runs(
        &mut self,
        random: &mut Random,
        backend: &Backend,
        one: (usize, usize, usize),
        element: Element,
    ) -> (Vec<f32>, Vec<f32>) {
        let parts = |attention: &Attention<'_>| {
            let PagedKv { arenas, layer, sequences } = attention.kv;
            let SequenceTable { row, spans, .. } = sequences[0];
            let runs: Vec<_> = work::runs(spans, 0..one.1, layer.page_size as usize).collect();
            assert!(runs.iter().map(|run| run.0).eq(0..work::run_count(spans)));
            // This layer is the last of its block.
            let bytes = layer.layout.k.rows.offset as usize..layer.block_bytes as usize;
            let stride = bytes.len() + 32;
            let (mut carried, mut start) = (Carried::default(), 0);
            while start < runs.len() {
                let end = runs.len().min(start + 1 + random.below(2));
                let mut here = vec![BlockRef::new(Tier::Disk, BlockId::new(0)); row.len()];
                let mut read = Vec::new();
                for page in runs[start..end].iter().flat_map(|run| run.1.clone()) {
                    here[page] = row[page];
                    if random.below(2) == 0 {
                        here[page] = BlockRef::new(Tier::Disk, BlockId::new((read.len() / stride) as u32));
                        let tier = arenas.base[row[page].tier().index()];
                        let block = row[page].block().index() as usize * layer.block_bytes as usize;
                        // SAFETY: the page is in its arena.
                        let block = unsafe { std::slice::from_raw_parts(tier.add(block), bytes.end) };
                        read.extend_from_slice(&block[bytes.clone()]);
                        read.resize(read.len() + 32, !0);
                    }
                }
                let base = read.as_mut_ptr().wrapping_sub(bytes.start);
                let arenas = arenas.with_disk(base, stride);
                let kv = PagedKv {
                    arenas: &arenas,
                    sequences: &[SequenceTable { row: &here, ..sequences[0] }],
                    layer,
                };
                let attention = Attention { kv, ..*attention };
                // SAFETY: as above; a page that is nowhere is not among those of these runs.
                unsafe { backend.attend_runs(&attention, start..end, &mut carried) }.expect("attend");
                start = end;
            }
        };
        self.attend_by(parts, &[one], element)
    }

    /// The partial results over the tokens before `ends` of each sequence; other pages are not in memory.
    pub(crate) fn attend_before(
        &mut self,
        backend: &Backend,
        batch: &[(usize, usize, usize)],
        ends: &[usize],
        element: Element,
    ) -> (Vec<f32>, Vec<f32>) {
        let (page, heads) = (self.layer.page_size as usize, self.layer.num_q_heads as usize);
        let dim = self.layer.geometry.v_head_dim as usize;
        let total: usize = batch.iter().map(|&(_, _, new)| new).sum();
        let mut parts = vec![f32::NAN; total * heads * (dim + 2) + 1];
        let leave = |&Attention { kv, queries, .. }: &Attention<'_>| {
            let tables = kv.sequences;
            let rows = tables.iter().zip(ends).map(|(table, &end)| {
                let mut here = vec![BlockRef::new(Tier::Disk, BlockId::new(1 << 29)); table.row.len()];
                let tokens = table
                    .spans
                    .iter()
                    .flat_map(|span| (span.skip..span.skip + span.count).map(move |row| (span, row)));
                for (span, row) in tokens.take(end) {
                    let entry = span.first_page as usize + row as usize / page;
                    here[entry] = table.row[entry];
                }
                here
            });
            let rows: Vec<_> = rows.collect();
            let tables = tables.iter().zip(&rows).map(|(table, row)| SequenceTable { row, ..*table });
            let tables: Vec<_> = tables.collect();
            // SAFETY: the tables are this world's, and there are floats for every token and head.
            unsafe {
                let kv = PagedKv { sequences: &tables, ..kv };
                backend.attend_before(&kv, queries, ends, parts.as_mut_ptr())
            }
            .expect("attend");
        };
        self.attend_by(leave, batch, element);
        assert!(parts.pop().is_some_and(f32::is_nan), "wrote past the end");
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for part in parts.chunks_exact(dim + 2) {
            let (values, max, sum) = (&part[..dim], part[dim], part[dim + 1]);
            let seen = sum > 0.0;
            out.extend(values.iter().map(|x| if seen { x / sum } else { 0.0 }));
            lse.push(if seen { (max + sum.log2()) * std::f32::consts::LN_2 } else { f32::NEG_INFINITY });
            assert!(seen || *part == [&vec![0.0; dim][..], &[f32::NEG_INFINITY, 0.0]].concat());
        }
        (out, lse)
    }

    /// As `attend`, but common pages, of `nodes` nodes, are read once: only their first sequence finds them in memory.
    pub(crate) fn attend_common(
        &mut self,
        backend: &Backend,
        batch: &[(usize, usize, usize)],
        nodes: usize,
        element: Element,
    ) -> (Vec<f32>, Vec<f32>) {
        let page = self.layer.page_size as usize;
        let once = |attention: &Attention<'_>| {
            let tables = attention.kv.sequences;
            let candidates = tables.iter().enumerate().filter_map(|(place, table)| match table.spans {
                [span] if (span.first_page, span.skip) == (0, 0) => {
                    let full = (span.count - table.new_tokens) as usize / page;
                    Some(Candidate { place: place as u32, pages: &table.row[..full] })
                }
                _ => None,
            });
            let mut commons = Commons::default();
            commons.find(&mut candidates.collect::<Vec<_>>(), page);
            assert_eq!(commons.nodes.len(), nodes, "{commons:?}");
            let mut rows: Vec<_> = tables.iter().map(|table| table.row.to_vec()).collect();
            for node in &commons.nodes {
                let pages = node.tokens.start as usize / page..node.tokens.end as usize / page;
                for &other in &commons.members[node.members.clone()][1..] {
                    let nowhere = BlockRef::new(Tier::Disk, BlockId::new(1 << 29));
                    rows[other as usize][pages.clone()].fill(nowhere);
                }
            }
            let tables = tables.iter().zip(&rows).map(|(table, row)| SequenceTable { row, ..*table });
            let tables: Vec<_> = tables.collect();
            let mut bounds = vec![0];
            bounds.extend(batch.iter().scan(0, |end, &(_, _, new)| {
                *end += new as u32;
                Some(*end)
            }));
            let mut shared = Shared::default();
            shared.fill(&commons, &bounds);
            let kv = PagedKv { sequences: &tables, ..attention.kv };
            // SAFETY: the tables are this world's, but for pages that others have.
            unsafe { backend.attend(&Attention { kv, shared: Some(&shared), ..*attention }) }
                .expect("attend");
        };
        self.attend_by(once, batch, element)
    }

    fn attend_by(
        &mut self,
        attend: impl FnOnce(&Attention<'_>),
        batch: &[(usize, usize, usize)],
        element: Element,
    ) -> (Vec<f32>, Vec<f32>) {
        let arenas = self.arenas();
        let heads = self.layer.num_q_heads as usize;
        let LayerGeometry { head_dim, v_head_dim, .. } = self.layer.geometry;
        let (dim, v_dim) = (head_dim as usize, v_head_dim as usize);
        let prefixes: Vec<_> = batch.iter().map(|&(s, len, _)| self.sequences[s].prefix(len)).collect();
        let tables: Vec<_> = batch
            .iter()
            .zip(&prefixes)
            .map(|(&(s, _, new), spans)| SequenceTable {
                row: &self.sequences[s].row,
                spans,
                new_tokens: new as u32,
            })
            .collect();
        let queries: Vec<f32> = batch
            .iter()
            .flat_map(|&(s, len, new)| {
                &self.sequences[s].queries[(len - new) * heads * dim..len * heads * dim]
            })
            .copied()
            .collect();
        let queries = encode(&queries, element);
        let total: usize = batch.iter().map(|&(_, _, new)| new).sum();
        let size = element.bytes();
        // Outputs lie with a gap between tokens that must stay as it is.
        let token_stride = heads * v_dim * size + 2 * size;
        let mut out = vec![0xa5u8; total * token_stride];
        let mut lse = vec![f32::NAN; total * heads];
        let target = RowsMut(Rows {
            ptr: out.as_mut_ptr(),
            element,
            token_stride: token_stride as isize,
            head_stride: (v_dim * size) as isize,
        });
        let queries = rows(&queries, element, heads, dim);
        attend(&Attention {
            kv: PagedKv { arenas: &arenas, layer: &self.layer, sequences: &tables },
            queries,
            sinks: self.sinks.as_deref(),
            out: target,
            lse: Some(lse.as_mut_ptr()),
            shared: None,
        });
        let mut result = Vec::new();
        for token in out.chunks_exact(token_stride) {
            let (values, gap) = token.split_at(heads * v_dim * size);
            assert!(gap.iter().all(|&b| b == 0xa5), "wrote past a row");
            result.extend(decode(values, element));
        }
        (result, lse)
    }

    /// What `attend` should say.
    pub(crate) fn expect(&self, batch: &[(usize, usize, usize)], element: Element) -> (Vec<f64>, Vec<f64>) {
        self.expect_before(batch, &vec![usize::MAX; batch.len()], self.sinks.as_deref(), element)
    }

    /// The same over the tokens before `ends`.
    pub(crate) fn expect_before(
        &self,
        batch: &[(usize, usize, usize)],
        ends: &[usize],
        sinks: Option<&[f32]>,
        element: Element,
    ) -> (Vec<f64>, Vec<f64>) {
        let layer = &self.layer;
        let geometry = layer.geometry;
        let (heads, dim, v_dim) =
            (layer.num_q_heads as usize, geometry.head_dim as usize, geometry.v_head_dim as usize);
        let kv_heads = geometry.num_kv_heads as usize;
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for (&(s, len, new), &end) in batch.iter().zip(ends) {
            let sequence = &self.sequences[s];
            let stored = |rows: &[f32], dim: usize, format: RowFormat, center: &[f32], rotated: bool| {
                let mut all = Vec::new();
                for (i, row) in rows.chunks_exact(dim).enumerate() {
                    let zero = vec![0.0; dim];
                    let center =
                        if center.is_empty() { &zero } else { &center[i % kv_heads * dim..][..dim].to_vec() };
                    let row: Vec<f32> = row.iter().zip(center).map(|(x, c)| x - c).collect();
                    let row = if rotated {
                        turn(&through(&turn(&row, false), format), true)
                    } else {
                        through(&row, format)
                    };
                    all.extend(row.iter().zip(center).map(|(x, c)| x + c));
                }
                all
            };
            let transform = &layer.transform;
            let keys = stored(&sequence.keys, dim, geometry.k_format, &transform.center, transform.rotate_k);
            let values = match geometry.v_format {
                Some(format) => stored(&sequence.values, v_dim, format, &[], transform.rotate_v),
                None => keys.chunks_exact(dim).flat_map(|row| &row[..v_dim]).copied().collect(),
            };
            let queries = given(&sequence.queries, element);
            let spans: Vec<SpanView> =
                sequence.spans.iter().flat_map(|s| vec![*s; s.count as usize]).collect();
            let mut keys: Vec<f64> = keys.into_iter().map(f64::from).collect();
            if let Some(weight) = &self.weight {
                let positions =
                    sequence.spans.iter().flat_map(|s| s.position..s.position + u64::from(s.count));
                for (key, position) in keys.chunks_exact_mut(kv_heads * dim).zip(positions) {
                    for key in key.chunks_exact_mut(dim) {
                        key.iter_mut().zip(weight).for_each(|(x, &w)| *x *= f64::from(w));
                        if let Some(rope) = &layer.rope {
                            key.copy_from_slice(&rotate(key, rope, position as f64));
                        }
                    }
                }
            }
            for i in len - new..len {
                let low = layer.window.map_or(0, |w| (i + 1).saturating_sub(w as usize));
                let seen: Vec<usize> =
                    (0..end.min(i + 1)).filter(|&j| j >= low || spans[j].sight != Sight::Window).collect();
                let offset = |j: usize| match spans[j].sight {
                    Sight::Trailing { from } => spans[j].offset as f64 + (i as i64 - from).max(0) as f64,
                    Sight::Window | Sight::Always => spans[j].offset as f64,
                };
                for head in 0..heads {
                    let kv = head / (heads / kv_heads);
                    let q: Vec<f64> =
                        queries[(i * heads + head) * dim..][..dim].iter().map(|&x| f64::from(x)).collect();
                    let scores: Vec<f64> = seen
                        .iter()
                        .map(|&j| {
                            let q = match &layer.rope {
                                Some(rope) => rotate(&q, rope, -offset(j)),
                                None => q.clone(),
                            };
                            let key = &keys[(j * kv_heads + kv) * dim..][..dim];
                            let dot: f64 = q.iter().zip(key).map(|(q, k)| q * k).sum();
                            let score = dot * f64::from(layer.scale);
                            layer
                                .softcap
                                .map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                        })
                        .collect();
                    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                    let sink = sinks.map_or(0.0, |sinks| (f64::from(sinks[head]) - top).exp());
                    let mut row = vec![0.0; v_dim];
                    for (&j, score) in seen.iter().zip(&scores) {
                        let weight = (score - top).exp() / (sum + sink);
                        for (x, &v) in row.iter_mut().zip(&values[(j * kv_heads + kv) * v_dim..]) {
                            *x += weight * f64::from(v);
                        }
                    }
                    out.extend(row);
                    lse.push(if scores.is_empty() { f64::NEG_INFINITY } else { top + sum.ln() });
                }
            }
        }
        (out, lse)
    }
}

/// Random signs and a Hadamard matrix over blocks, or its inverse, written out.
fn turn(x: &[f32], back: bool) -> Vec<f32> {
    let size = 1 << x.len().trailing_zeros();
    let sign = |i: usize| {
        if Random((i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)).next() & 1 == 0 { 1.0 } else { -1.0 }
    };
    let mut out = Vec::new();
    for i in 0..x.len() {
        let first = i / size * size;
        let entry = |j: usize| {
            let parity = ((i - first) & (j - first)).count_ones() % 2;
            f64::from(x[j]) * if back { 1.0 } else { sign(j) } * if parity == 0 { 1.0 } else { -1.0 }
        };
        let sum: f64 = (first..first + size).map(entry).sum();
        let scale = f64::from(1.0 / (size as f32).sqrt());
        out.push((sum * scale * if back { sign(i) } else { 1.0 }) as f32);
    }
    out
}

fn rotate(q: &[f64], rope: &Rope, by: f64) -> Vec<f64> {
    let mut out = q.to_vec();
    let n = rope.inv_freq.len();
    for i in 0..n {
        let (a, b) = if rope.interleaved { (2 * i, 2 * i + 1) } else { (i, i + n) };
        let (sin, cos) = (by * f64::from(rope.inv_freq[i])).sin_cos();
        out[a] = q[a] * cos - q[b] * sin;
        out[b] = q[a] * sin + q[b] * cos;
    }
    out
}

/// A contiguous array `[token][heads][dim]`.
pub(crate) fn rows(bytes: &[u8], element: Element, heads: usize, dim: usize) -> Rows {
    let head_stride = (element.bytes() * dim) as isize;
    Rows { ptr: bytes.as_ptr(), element, token_stride: head_stride * heads as isize, head_stride }
}
