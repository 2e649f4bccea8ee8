//! How close decode attention comes to the read bandwidth of the machine, and prefill to its arithmetic.
//!
//! `cargo bench -p pagoda-cpu --bench decode -- [threads=1,2] [formats=f16,bf16,f32] [contexts=4096,32768,131072]
//! [pages=64,256] [shapes=32/8x128,8/2x256] [cached=4/1x128,4/1x256,1/1x128,8/1x128] [samples=9] [isa=avx2]
//! [sections=decode,formats,cached,order,small,append,peaked,prefill,shared]`
//!
//! One query token, batch 1. Layers are rotated over at least 512 MiB, so that every call finds cold caches. Every
//! sample of attention is bracketed by sequential reads of the same memory with as many threads; the ratio is the
//! median over samples of attention over the mean of its brackets. KV bytes count once.

#![expect(clippy::print_stdout, reason = "a bench prints its table")]

use std::hint::black_box;
use std::time::Instant;

use memmap2::{Advice, MmapMut};
use pagoda_core::common::{Common, Commons};
use pagoda_core::ids::{BlockId, BlockRef, Tier};
use pagoda_core::layout::{BlockLayout, LayerGeometry, RowFormat};
use pagoda_core::table::{Sight, SpanView};
use pagoda_cpu::{
    Arenas, Attention, Backend, Element, Isa, Layer, PagedKv, Rows, RowsMut, SequenceTable, Shared, Transform,
};

/// The memory that layers rotate over, at least.
const COLD: u64 = 512 << 20;

/// What can be set.
const NAMES: [&str; 9] =
    ["threads", "formats", "contexts", "pages", "shapes", "cached", "samples", "isa", "sections"];

/// The settings of a run.
struct Options(Vec<String>);

impl Options {
    /// Those of the command line, where cargo has an option of its own.
    fn given() -> Self {
        let given: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
        for arg in &given {
            let known = arg.split_once('=').is_some_and(|(name, _)| NAMES.contains(&name));
            assert!(known, "{arg} is not a setting: one of {NAMES:?}, with = and words");
        }
        Self(given)
    }

    /// The words given for `name`, or those of `default`.
    fn words(&self, name: &str, default: &str) -> Vec<String> {
        let given = self.0.iter().find_map(|arg| arg.strip_prefix(name)?.strip_prefix('='));
        given.unwrap_or(default).split(',').map(str::to_owned).collect()
    }

    fn numbers(&self, name: &str, default: &str) -> Vec<usize> {
        self.words(name, default).iter().map(|word| word.parse().expect("a number")).collect()
    }
}

#[derive(Clone, Copy)]
struct Shape {
    q_heads: u32,
    kv_heads: u32,
    dim: u32,
}

/// `32/8x128`.
fn shape(word: &str) -> Shape {
    let numbers: Vec<u32> = word.split(['/', 'x']).map(|n| n.parse().expect("q/kv x dim")).collect();
    Shape { q_heads: numbers[0], kv_heads: numbers[1], dim: numbers[2] }
}

fn format(word: &str) -> RowFormat {
    let named = RowFormat::ALL.into_iter().find(|format| format!("{format:?}").eq_ignore_ascii_case(word));
    named.unwrap_or_else(|| panic!("{word} is not a row format: one of {:?}", RowFormat::ALL))
}

/// A cache of one sequence whose pages lie in a given order.
struct Cache {
    memory: MmapMut,
    layout: BlockLayout,
    layer: Layer,
    row: Vec<BlockRef>,
    spans: [SpanView; 1],
    /// K and V bytes of a layer.
    bytes: u64,
    next_layer: usize,
    queries: Vec<f32>,
    out: Vec<f32>,
}

impl Cache {
    /// Of as many layers as fill `cold` bytes.
    fn new(
        shape: Shape,
        format: RowFormat,
        context: usize,
        page: usize,
        shuffled: bool,
        new_tokens: usize,
        cold: u64,
    ) -> Self {
        let geometry = LayerGeometry {
            num_kv_heads: shape.kv_heads,
            head_dim: shape.dim,
            v_head_dim: shape.dim,
            k_format: format,
            v_format: Some(format),
        };
        let row = format.row_bytes(shape.dim) + format.scale_bytes(shape.dim);
        let bytes = 2 * u64::from(shape.kv_heads) * row * context as u64;
        let layers = cold.div_ceil(bytes).max(1) as usize;
        let layout = BlockLayout::new(&vec![geometry; layers], page as u32);
        let pages = context.div_ceil(page);
        let mut memory = MmapMut::map_anon(layout.block_bytes as usize * pages).expect("memory");
        memory.advise(Advice::HugePage).expect("transparent huge pages");
        let mut state = 1u64;
        let mut random = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 33
        };
        // Numbers, or scales, of magnitude 1/8 to 1/2 in every format.
        let (mask, bits) = match format {
            RowFormat::F32 | RowFormat::Fp8E4m3 | RowFormat::Int8 => {
                (0x807f_ffff_807f_ffff, 0x3e00_0000_3e00_0000)
            }
            RowFormat::F16 | RowFormat::Q8_0 | RowFormat::Q5_0 | RowFormat::Q4_0 => {
                (0x83ff_83ff_83ff_83ff, 0x3000_3000_3000_3000)
            }
            RowFormat::Bf16 => (0x807f_807f_807f_807f, 0x3e00_3e00_3e00_3e00u64),
            RowFormat::Mxfp4 => (0x0101_0101_0101_0101, 0x7c7c_7c7c_7c7c_7c7c),
            RowFormat::Nvfp4 => (0x0707_0707_0707_0707, 0x2828_2828_2828_2828),
        };
        for word in memory.chunks_exact_mut(8) {
            word.copy_from_slice(&((random() << 33 ^ random() << 13 ^ random()) & mask | bits).to_ne_bytes());
        }
        let mut order: Vec<u32> = (0..pages as u32).collect();
        if shuffled {
            for i in (1..pages).rev() {
                order.swap(i, random() as usize % (i + 1));
            }
        }
        let rows = new_tokens * (shape.q_heads * shape.dim) as usize;
        Self {
            memory,
            layer: Layer {
                geometry,
                layout: layout.layers[0],
                block_bytes: layout.block_bytes,
                page_size: page as u32,
                num_q_heads: shape.q_heads,
                scale: 1.0 / (shape.dim as f32).sqrt(),
                softcap: None,
                window: None,
                rope: None,
                transform: Transform::default(),
                derived: None,
            },
            layout,
            row: order.into_iter().map(|i| BlockRef::new(Tier::Device, BlockId::new(i))).collect(),
            spans: [SpanView {
                first_page: 0,
                skip: 0,
                count: context as u32,
                position: 0,
                offset: 0,
                sight: Sight::Window,
            }],
            bytes,
            next_layer: 0,
            queries: (0..rows).map(|i| (i % 17) as f32 / 8.0 - 1.0).collect(),
            out: vec![0.0; rows],
        }
    }

    /// Writes K and V of the last `new_tokens` tokens of a layer: the queries.
    fn append(&mut self, backend: &Backend, new_tokens: u32) {
        let table = SequenceTable { row: &self.row, spans: &self.spans, new_tokens };
        let arenas = Arenas::new(self.memory.as_mut_ptr(), std::ptr::null_mut());
        let head_stride = self.layer.geometry.head_dim as isize * 4;
        let token_stride = head_stride * self.layer.num_q_heads as isize;
        let rows =
            Rows { ptr: self.queries.as_ptr().cast(), element: Element::F32, token_stride, head_stride };
        let kv = PagedKv { arenas: &arenas, layer: &self.layer, sequences: &[table] };
        // SAFETY: the row names blocks of `memory`, and the arrays have a row for every token and head.
        unsafe { backend.append(&kv, rows, Some(rows), false) }.expect("append");
        black_box(&self.memory);
    }

    /// Attention of the last `new_tokens` tokens in the next layer.
    fn attend(&mut self, backend: &Backend, new_tokens: u32) {
        self.attend_forks(backend, 1, new_tokens, None);
    }

    /// The same of so many sequences, all over the same pages.
    fn attend_forks(&mut self, backend: &Backend, forks: usize, new_tokens: u32, shared: Option<&Shared>) {
        self.layer.layout = self.layout.layers[self.next_layer];
        self.next_layer = (self.next_layer + 1) % self.layout.layers.len();
        let table = SequenceTable { row: &self.row, spans: &self.spans, new_tokens };
        let arenas = Arenas::new(self.memory.as_mut_ptr(), std::ptr::null_mut());
        let head_stride = self.layer.geometry.head_dim as isize * 4;
        let token_stride = head_stride * self.layer.num_q_heads as isize;
        let element = Element::F32;
        let queries = Rows { ptr: self.queries.as_ptr().cast(), element, token_stride, head_stride };
        let out = RowsMut(Rows { ptr: self.out.as_mut_ptr().cast(), element, token_stride, head_stride });
        let kv = PagedKv { arenas: &arenas, layer: &self.layer, sequences: &vec![table; forks] };
        // SAFETY: the row names blocks of `memory`, and the arrays have a row for every token and head.
        unsafe { backend.attend(&Attention { kv, queries, sinks: None, out, lse: None, shared }) }
            .expect("attend");
        black_box(&self.out);
    }
}

/// Adds up words, so that every one is read.
fn sum(words: &[u64]) -> u64 {
    #[inline(always)]
    fn lanes(words: &[u64]) -> u64 {
        let mut sums = [0u64; 64];
        for chunk in words.chunks_exact(64) {
            for (sum, word) in sums.iter_mut().zip(chunk) {
                *sum = sum.wrapping_add(*word);
            }
        }
        sums.iter().fold(0, |a, b| a.wrapping_add(*b))
    }
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f")]
        fn wide(words: &[u64]) -> u64 {
            lanes(words)
        }
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: detected.
            return unsafe { wide(words) };
        }
    }
    lanes(words)
}

/// GB/s of reading 512 MiB of `memory` in order with so many threads.
fn probe(memory: &[u8], threads: usize) -> f64 {
    // SAFETY: any bytes are words.
    let (_, words, _) = unsafe { memory[..memory.len().min(COLD as usize)].align_to::<u64>() };
    let start = Instant::now();
    std::thread::scope(|scope| {
        for part in words.chunks(words.len().div_ceil(threads)).skip(1) {
            scope.spawn(move || black_box(sum(part)));
        }
        black_box(sum(&words[..words.len().div_ceil(threads)]));
    });
    words.len() as f64 * 8.0 / start.elapsed().as_secs_f64() / 1e9
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// Medians of attention GB/s, bracketing read GB/s, and their ratio.
fn measure(cache: &mut Cache, backend: &Backend, samples: usize) -> [f64; 3] {
    let calls = (COLD / 2).div_ceil(cache.bytes).max(1);
    cache.attend(backend, 1);
    let mut all = [vec![], vec![], vec![]];
    let mut before = probe(&cache.memory, backend.threads());
    for _ in 0..samples {
        let start = Instant::now();
        for _ in 0..calls {
            cache.attend(backend, 1);
        }
        let rate = (cache.bytes * calls) as f64 / start.elapsed().as_secs_f64() / 1e9;
        let after = probe(&cache.memory, backend.threads());
        let bracket = f64::midpoint(before, after);
        for (list, value) in all.iter_mut().zip([rate, bracket, rate / bracket]) {
            list.push(value);
        }
        before = after;
    }
    all.map(median)
}

fn decode(options: &Options, samples: usize) {
    println!("decode: KV GB/s | sequential read GB/s | ratio (threads x page size), shuffled pages");
    let pages = options.numbers("pages", "64,256");
    for threads in options.numbers("threads", "1,2") {
        let backend = backend(options, threads, false);
        for shape_word in options.words("shapes", "32/8x128,8/2x256") {
            for format_word in options.words("formats", "f16,bf16,f32") {
                for context in options.numbers("contexts", "4096,32768,131072") {
                    print!("{threads}T {shape_word:>9} {format_word:>4} {context:>7}");
                    for &page in &pages {
                        let mut cache = Cache::new(
                            shape(&shape_word),
                            format(&format_word),
                            context,
                            page,
                            true,
                            1,
                            COLD,
                        );
                        let [rate, bracket, ratio] = measure(&mut cache, &backend, samples);
                        print!("   {page:>3}: {rate:5.1} | {bracket:5.1} | {:3.0} %", ratio * 100.0);
                    }
                    println!();
                }
            }
        }
    }
}

/// Row formats by turns, so that all see the same machine: what is quantised has to gain what its bytes promise.
fn formats(options: &Options, samples: usize) {
    println!(
        "formats: tokens a second, over those of the first format | KV GB/s (pages of 64, shuffled; medians)"
    );
    for threads in options.numbers("threads", "1,2") {
        let backend = backend(options, threads, false);
        for shape_word in options.words("shapes", "32/8x128,8/2x256") {
            for context in options.numbers("contexts", "32768,131072") {
                let words = options.words("formats", "f16,int8,q8_0,q5_0,q4_0,mxfp4");
                let make =
                    |word: &String| Cache::new(shape(&shape_word), format(word), context, 64, true, 1, COLD);
                let mut caches: Vec<_> = words.iter().map(make).collect();
                let mut times = vec![vec![]; caches.len()];
                for _ in 0..8 * samples {
                    for (cache, times) in caches.iter_mut().zip(&mut times) {
                        let calls = ((64 << 20) / cache.bytes).max(1);
                        let start = Instant::now();
                        for _ in 0..calls {
                            cache.attend(&backend, 1);
                        }
                        times.push(start.elapsed().as_secs_f64() / calls as f64);
                    }
                }
                print!("{threads}T {shape_word:>9} {context:>7}");
                for ((word, cache), of_format) in words.iter().zip(&caches).zip(&times) {
                    let ratio = median(times[0].iter().zip(of_format).map(|(a, b)| a / b).collect());
                    let rate = cache.bytes as f64 / median(of_format.clone()) / 1e9;
                    print!("   {word}: {ratio:.2} | {rate:.1}");
                }
                println!();
            }
        }
    }
}

/// What the arithmetic alone takes: one K/V head that stays in the L2 cache, row formats by turns, the best of many calls.
fn cached(options: &Options, samples: usize) {
    println!(
        "cached: ns a token and K/V head, where memory is not read (one thread; the least of {} calls)",
        40 * samples
    );
    let backend = backend(options, 1, false);
    for shape_word in options.words("cached", "4/1x128,4/1x256,1/1x128,8/1x128") {
        let shape = shape(&shape_word);
        let stored = (64 << 10) / shape.dim as usize;
        let context = 16 * stored;
        let words = options.words("formats", "f16,int8,q8_0,q5_0,q4_0,mxfp4");
        let make = |word: &String| {
            let mut cache = Cache::new(shape, format(word), stored, 64, true, 1, 0);
            // The same pages again and again.
            cache.row = cache.row.repeat(context / stored);
            cache.spans[0].count = context as u32;
            cache
        };
        let mut caches: Vec<_> = words.iter().map(make).collect();
        let mut least = vec![f64::INFINITY; caches.len()];
        for _ in 0..10 * samples {
            for (cache, least) in caches.iter_mut().zip(&mut least) {
                for _ in 0..4 {
                    let start = Instant::now();
                    cache.attend(&backend, 1);
                    *least = least.min(start.elapsed().as_secs_f64());
                }
            }
        }
        print!("{shape_word:>9}");
        for (word, least) in words.iter().zip(&least) {
            print!("   {word}: {:5.2}", least * 1e9 / (context * shape.kv_heads as usize) as f64);
        }
        println!();
    }
}

/// Paged against contiguous: the same kernel over pages in order.
fn order(options: &Options, samples: usize) {
    println!(
        "order: KV GB/s with one page for all | pages in order | shuffled (f16, 32/8x128, 32768, 1 thread)"
    );
    let backend = backend(options, 1, false);
    for page in options.numbers("pages", "64,256") {
        let rates = [(4096, false), (page, false), (page, true)].map(|(page, shuffled)| {
            let mut cache = Cache::new(shape("32/8x128"), RowFormat::F16, 32768, page, shuffled, 1, COLD);
            measure(&mut cache, &backend, samples)
        });
        let [one, ordered, shuffled] = rates;
        println!(
            "page {page:>3}: 4096-token pages {:5.1} ({:.0} %) | in order {:5.1} ({:.0} %) | shuffled {:5.1} ({:.0} %)",
            one[0],
            one[2] * 100.0,
            ordered[0],
            ordered[2] * 100.0,
            shuffled[0],
            shuffled[2] * 100.0
        );
    }
}

/// Calls with next to nothing to do.
fn small(options: &Options) {
    println!("small: microseconds of a call, rows as they are | rotated (median of 2000)");
    for threads in options.numbers("threads", "1,2") {
        let backend = backend(options, threads, false);
        for word in options.words("formats", "f16,q8_0,q4_0") {
            for context in [1, 64, 512] {
                let mut cache = Cache::new(shape("32/8x128"), format(&word), context, 64, false, 1, 0);
                print!("  {threads}T {word:>7} context {context:>4}:");
                for rotate in [false, true] {
                    cache.layer.transform = rotated(rotate);
                    let times = (0..2000).map(|_| {
                        cache.next_layer = 0;
                        let start = Instant::now();
                        cache.attend(&backend, 1);
                        start.elapsed().as_secs_f64() * 1e6
                    });
                    print!(" {:6.2}", median(times.collect()));
                }
                println!();
            }
        }
    }
}

/// Rows rotated, or as they are.
fn rotated(rotate: bool) -> Transform {
    Transform { rotate_k: rotate, rotate_v: rotate, ..Transform::default() }
}

/// Nanoseconds that one thread takes for a row of K or V on its way into a page, of 64 tokens; rotated or as they come.
fn append(options: &Options) {
    println!("append: ns a row of 128, f32 to a format, as it is | rotated (the least of 500 calls)");
    let backend = backend(options, 1, false);
    for word in options.words("formats", "f32,f16,fp8e4m3,int8,q8_0,q5_0,q4_0,mxfp4,nvfp4") {
        let mut cache = Cache::new(shape("8/8x128"), format(&word), 64, 64, false, 64, 1);
        print!("  {word:>7}:");
        for rotate in [false, true] {
            cache.layer.transform = rotated(rotate);
            let times = (0..500).map(|_| {
                let start = Instant::now();
                cache.append(&backend, 64);
                start.elapsed().as_secs_f64() * 1e9 / (2.0 * 8.0 * 64.0)
            });
            print!(" {:6.1}", times.fold(f64::MAX, f64::min));
        }
        println!();
    }
}

/// Scores further and further apart, so that most weights are next to nothing: that must not take longer.
fn peaked(options: &Options, samples: usize) {
    println!(
        "peaked: ms of a call, and how many times as long it takes with larger queries (32/8x128, 8192, 1 thread; least)"
    );
    let backend = backend(options, 1, false);
    for word in options.words("formats", "f16,bf16,q8_0,q4_0") {
        let mut cache = Cache::new(shape("32/8x128"), format(&word), 8192, 64, true, 1, COLD);
        let queries = cache.queries.clone();
        let mut first = None;
        print!("  {word:>7}:");
        for factor in [1, 30, 60, 100, 200, 1000, 10_000] {
            cache.queries = queries.iter().map(|x| x * factor as f32).collect();
            let times = (0..10 * samples).map(|_| {
                let start = Instant::now();
                cache.attend(&backend, 1);
                start.elapsed().as_secs_f64() * 1e3
            });
            let least = times.fold(f64::MAX, f64::min);
            match first {
                None => print!(" {least:.2} ms"),
                Some(first) => print!("  {factor}x: {:.2}", least / first),
            }
            first = first.or(Some(least));
        }
        println!();
    }
}

fn prefill(options: &Options) {
    println!(
        "prefill: GFLOP/s of 2048 new tokens at the end of 32768 (32/8x128; 4 flop a query, key and element)"
    );
    let (context, new) = (32768usize, 2048usize);
    let seen = new as f64 * (context as f64 - (new as f64 - 1.0) / 2.0);
    for threads in options.numbers("threads", "1,2") {
        for word in options.words("formats", "f16") {
            let mut cache = Cache::new(shape("32/8x128"), format(&word), context, 64, true, new, COLD);
            print!("{threads}T {word:>5}:");
            for deterministic in [false, true] {
                let backend = backend(options, threads, deterministic);
                let start = Instant::now();
                cache.attend(&backend, new as u32);
                let rate = seen * 32.0 * 128.0 * 4.0 / start.elapsed().as_secs_f64() / 1e9;
                print!("  deterministic={deterministic} {rate:6.1}");
            }
            println!();
        }
    }
}

/// Forks of one sequence, whose pages are read for each of them or once.
fn shared(options: &Options, samples: usize) {
    println!("shared: ms of forks of 16384 tokens (32/8x128), pages read for each | once (medians)");
    for threads in options.numbers("threads", "1,2") {
        let backend = backend(options, threads, false);
        for word in options.words("formats", "f16,bf16,f32,fp8e4m3,q8_0,q4_0") {
            print!("{threads}T {word:>7}:");
            for forks in [2u32, 4, 8, 16] {
                let mut cache =
                    Cache::new(shape("32/8x128"), format(&word), 16384, 64, true, forks as usize, COLD);
                let node = Common { tokens: 0..16384 - 64, members: 0..forks as usize };
                let commons = Commons { nodes: vec![node], members: (0..forks).collect() };
                let mut shared = Shared::default();
                shared.fill(&commons, &(0..=forks).collect::<Vec<_>>());
                print!("  {forks}");
                for shared in [None, Some(&shared)] {
                    let times = (0..samples).map(|_| {
                        let start = Instant::now();
                        cache.attend_forks(&backend, forks as usize, 1, shared);
                        start.elapsed().as_secs_f64() * 1e3
                    });
                    print!(" {:.2}", median(times.collect()));
                }
            }
            println!();
        }
    }
}

/// The instruction set to use.
fn isa(options: &Options) -> Isa {
    let best = Isa::detect().to_string();
    let word = &options.words("isa", &best)[0];
    let named = Isa::ALL.into_iter().find(|isa| isa.to_string() == *word);
    named.unwrap_or_else(|| panic!("{word} is not an instruction set: one of {:?}", Isa::ALL))
}

/// A backend with that instruction set.
fn backend(options: &Options, threads: usize, deterministic: bool) -> Backend {
    Backend::new(threads, deterministic, Some(isa(options))).expect("supported")
}

fn main() {
    let options = Options::given();
    let samples = options.numbers("samples", "9")[0];
    println!("{} on {} cores", isa(&options), std::thread::available_parallelism().map_or(1, Into::into));
    let sections = "decode,formats,cached,order,small,append,peaked,prefill,shared";
    for section in options.words("sections", sections) {
        match section.as_str() {
            "decode" => decode(&options, samples),
            "formats" => formats(&options, samples),
            "cached" => cached(&options, samples),
            "order" => order(&options, samples),
            "small" => small(&options),
            "append" => append(&options),
            "peaked" => peaked(&options, samples),
            "prefill" => prefill(&options),
            "shared" => shared(&options, samples),
            _ => panic!("{section} is not a section"),
        }
    }
}
