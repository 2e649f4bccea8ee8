//! The store against a naive model: a page is the bytes that were written, or an error. Never other bytes.

use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};

#[derive(Clone, Debug)]
enum Step {
    Write(bool, Vec<u8>),
    Read(bool, u8, u8),
    Put(u8, Vec<u8>),
    Delete(u8),
    Reopen,
    Fault(u8, u8),
    PowerLoss(u64),
}

fn steps(faults: bool) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (any::<bool>(), proptest::collection::vec(any::<u8>(), 1..6)).prop_map(|(g, b)| Step::Write(g, b)),
        6 => any::<(bool, u8, u8)>().prop_map(|(g, b, l)| Step::Read(g, b, l)),
        3 => (0u8..4, proptest::collection::vec(any::<u8>(), 0..6)).prop_map(|(k, b)| Step::Put(k, b)),
        1 => (0u8..4).prop_map(Step::Delete),
        1 => Just(Step::Reopen),
        1 => any::<u64>().prop_map(Step::PowerLoss),
        if faults { 4 } else { 0 } => (0u8..12, 0..Fault::ALL.len() as u8).prop_map(|(n, f)| Step::Fault(n, f)),
    ];
    proptest::collection::vec(step, 1..60)
}

/// What the caller of a store knows: what it wrote where, and what it keeps.
struct Model {
    disk: FaultyDisk,
    store: Arc<Store>,
    lane: Lane,
    written: HashMap<At, u64>,
    kept: BTreeMap<Vec<u8>, Vec<(At, u64)>>,
    next: u64,
    faulty: bool,
    /// Whether the drive may have reported what it did not do.
    lied: bool,
    blocks: [Vec<u32>; 2],
}

impl Model {
    fn new(faulty: bool) -> Self {
        let disk = FaultyDisk::default();
        let store = open(&disk).unwrap().0;
        let lane = store.lane().unwrap();
        Self {
            disk,
            store,
            lane,
            written: HashMap::new(),
            kept: BTreeMap::new(),
            next: 1,
            faulty,
            lied: false,
            blocks: [LARGE, SMALL].map(blocks),
        }
    }

    fn is_kept(&self, place: At) -> bool {
        self.store
            .entries()
            .iter()
            .flat_map(|(_, entry)| &entry.pages)
            .any(|page| (page.group, page.block) == (place.0.0, place.1))
    }

    fn reopen(&mut self, disk: FaultyDisk) {
        disk.calm();
        (self.disk, self.written) = (disk, HashMap::new());
        let (store, recovered) = match open(&self.disk) {
            Ok(opened) => opened,
            Err(error) => {
                assert!(self.lied && matches!(error, Error::Index(_)), "{error}");
                *self = Self::new(true);
                return;
            }
        };
        self.lane = store.lane().unwrap();
        self.store = store;
        if !self.faulty {
            assert_eq!(recovered.lost, []);
            let found: Vec<_> = self.store.entries().into_iter().map(|(key, _)| key).collect();
            assert!(found.iter().eq(self.kept.keys()), "kept keys survive");
        }
        self.kept.clear();
        for (key, entry) in self.store.entries() {
            let names = entry.meta.chunks_exact(8).map(|n| u64::from_le_bytes(n.try_into().unwrap()));
            let places = entry.pages.iter().map(|page| (GroupId(page.group), page.block));
            let pages: Vec<_> = places.zip(names).collect();
            assert_eq!(pages.len(), entry.pages.len());
            for &((group, block), name) in &pages {
                let result = read(&mut self.lane, group, &[(block, name)], layers(group));
                if !self.faulty {
                    result.unwrap();
                }
                self.written.insert((group, block), name);
            }
            self.kept.insert(key, pages);
        }
    }

    fn apply(&mut self, step: &Step) {
        let group = |large: bool| if large { LARGE } else { SMALL };
        match step {
            Step::Write(large, picks) => {
                let group = group(*large);
                let mut pages: Vec<(u32, u64)> = Vec::new();
                for &pick in picks {
                    let own = &self.blocks[group.index()];
                    let block = own[usize::from(pick) % own.len()];
                    if !self.is_kept((group, block)) && pages.iter().all(|page| page.0 != block) {
                        pages.push((block, self.next));
                        self.next += 1;
                    }
                }
                let result = write(&mut self.lane, group, &pages);
                for (block, name) in pages {
                    match &result {
                        Ok(()) => self.written.insert((group, block), name),
                        Err(error) if self.faulty => {
                            assert!(matches!(error, Error::Io { .. }), "{error}");
                            self.written.remove(&(group, block))
                        }
                        Err(error) => panic!("{error}"),
                    };
                }
            }
            Step::Read(large, pick, layer) => {
                let group = group(*large);
                let own = &self.blocks[group.index()];
                let block = own[usize::from(*pick) % own.len()];
                let layer = usize::from(*layer) % layers(group).len();
                let name = self.written.get(&(group, block)).copied();
                let result = read(&mut self.lane, group, &[(block, name.unwrap_or(0))], layer..layer + 1);
                match (name, result) {
                    (None, Err(Error::Corrupt { .. })) => {}
                    (None, other) => panic!("nothing was written, and {other:?}"),
                    (Some(_), result) => assert!(self.faulty || result.is_ok()),
                }
            }
            Step::Put(key, picks) => {
                let all: Vec<_> = self.written.iter().map(|(place, name)| (*place, *name)).collect();
                let mut pages: Vec<(At, u64)> = if all.is_empty() {
                    Vec::new()
                } else {
                    picks.iter().map(|&pick| all[usize::from(pick) % all.len()]).collect()
                };
                pages.sort();
                let meta: Vec<u8> = pages.iter().flat_map(|(_, name)| name.to_le_bytes()).collect();
                let places: Vec<_> = pages.iter().map(|((g, b), _)| (*g, BlockId::new(*b))).collect();
                let result = self.store.put(&[*key], &places, &meta);
                assert!(self.faulty || result.is_ok(), "{result:?}");
                if result.is_ok() {
                    self.kept.insert(vec![*key], pages);
                }
            }
            Step::Delete(key) => {
                let result = self.store.delete(&[*key]);
                assert!(self.faulty || result.is_ok());
                if result.is_ok() {
                    self.kept.remove(&vec![*key]);
                }
            }
            Step::Reopen => self.reopen(self.disk.killed()),
            Step::PowerLoss(seed) => {
                let mut state = seed | 1;
                let survives = || {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    state >> 63 == 1
                };
                self.reopen(self.disk.power_lost(survives));
            }
            Step::Fault(after, fault) => {
                let fault = Fault::ALL[*fault as usize];
                self.lied |= !fault.is_honest();
                self.disk.fail(u64::from(*after), fault);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn what_is_kept_survives_kills_and_losses_of_power(steps in steps(false)) {
        let mut model = Model::new(false);
        steps.iter().for_each(|step| model.apply(step));
    }

    #[test]
    fn faults_make_errors_never_wrong_bytes(steps in steps(true)) {
        let mut model = Model::new(true);
        steps.iter().for_each(|step| model.apply(step));
    }
}
