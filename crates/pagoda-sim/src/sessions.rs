//! Sequences that are kept under keys, and what remains of them when a process ends.

use crate::copies::Late;
use crate::drive::Conduct;
use crate::machine::{Machine, Outcome, Tokens, ensure, placed};
use pagoda_core::Error;
use pagoda_core::ids::{GroupId, KeptId, Tier};
use pagoda_core::keep::{KeptGroup, KeptPage};
use pagoda_core::plan::Selection;
use pagoda_store::disk::{Recovered, sequence};
use std::collections::BTreeMap;

/// How many keys are used.
const KEYS: usize = 4;

/// What is kept: according to the cache, and as it should be.
#[derive(Default)]
pub(crate) struct Sessions {
    kept: BTreeMap<Key, (KeptId, usize)>,
    /// Saves that failed but may be on the drive nevertheless.
    doubtful: Vec<KeptId>,
    /// Every save that was tried: its key and its tokens.
    saves: Vec<(Key, Tokens)>,
    /// What the drive may have under each key: the last save that was acknowledged, and later ones that were not. `None`
    /// means no save.
    possible: BTreeMap<Key, Vec<Option<usize>>>,
}

type Key = Vec<u8>;

impl Sessions {
    /// Everything that the cache keeps.
    pub(crate) fn all(&mut self) -> Vec<KeptId> {
        let kept = std::mem::take(&mut self.kept).into_values().map(|(kept, _)| kept);
        kept.chain(std::mem::take(&mut self.doubtful)).collect()
    }

    fn possible(&mut self, key: &Key) -> &mut Vec<Option<usize>> {
        self.possible.entry(key.clone()).or_insert_with(|| vec![None])
    }
}

impl Machine {
    fn any_key(&mut self) -> Key {
        vec![b'k', self.random.below(KEYS) as u8]
    }

    pub(crate) fn save(&mut self) -> Outcome {
        let (Some(live), key) = (self.pick_live(), self.any_key()) else { return Ok(()) };
        let mut all = Selection::of(0..live.tokens.all.len() as u64, self.shape.group_ids().collect());
        all.keep = true;
        let plan = self.cache.plan(live.id, Tier::Disk, &all).map_err(|error| error.to_string())?;
        let jobs = self.jobs.len();
        if self.launch(&plan)? && self.jobs.len() > jobs {
            self.report(jobs, false)?;
        }
        // A fork, so that open pages do not change while they are copied.
        let own = self.cache.fork(live.id);
        let Some(own) = self.unless_stepping(live.id, own)? else { return Ok(()) };
        let keeping = self.cache.keep(own);
        if let Ok((kept, copies)) = &keeping
            && self.gives_up(copies, Late { sequence: Some(own), kept: Some(*kept), ..Late::default() })
        {
            return Ok(());
        }
        self.cache.release(own).map_err(|error| error.to_string())?;
        let (kept, copies) = match keeping {
            Ok(keeping) => keeping,
            Err(Error::OutOfBlocks { tier: Tier::Disk, .. }) => {
                self.tally.see("refused: saves without room", 1);
                return Ok(());
            }
            Err(Error::InvalidArgument { argument: "sequence", .. }) => {
                self.tally.see("refused: saves of pages elsewhere", 1);
                return Ok(());
            }
            Err(error) => return Err(error.to_string()),
        };
        if self.copy_now(&copies)?.is_err() {
            self.cache.forget(kept);
            return Ok(());
        }
        let save = self.sessions.saves.len();
        self.sessions.saves.push((key.clone(), live.tokens));
        let described = self.cache.describe(kept).ok_or("what is kept cannot be written down")?;
        let (blocks, entry) = sequence::encode(&described, &(save as u64).to_le_bytes());
        self.remember(|| format!("save {save} under {key:?}"));
        let put = self.drive.store.put(&key, &blocks, &entry);
        if self.judge(put)?.is_err() {
            self.sessions.doubtful.push(kept);
            self.forget_doubtful();
            // Like the binding: copies that a sync may have lost are made again.
            let store = &self.drive.store;
            for group in self.shape.group_ids() {
                let lost = |_, block| store.may_have_lost(group, block);
                self.cache.drop_copies_if(Tier::Disk, group, usize::MAX, lost);
            }
            self.sessions.possible(&key).push(Some(save));
            return Ok(());
        }
        self.tally.see("saves", 1);
        self.forget_doubtful();
        *self.sessions.possible(&key) = vec![Some(save)];
        if let Some((before, _)) = self.sessions.kept.insert(key, (kept, save)) {
            self.forget_kept(before);
        }
        Ok(())
    }

    pub(crate) fn load(&mut self) -> Outcome {
        let key = self.any_key();
        let Some(&(kept, save)) = self.sessions.kept.get(&key).filter(|_| self.has_room()) else {
            return Ok(());
        };
        match self.cache.revive(kept) {
            Ok((id, copies)) => {
                let needs = Late { sequence: Some(id), source: Some(kept), ..Late::default() };
                if self.gives_up(&copies, needs) {
                    return Ok(());
                }
                if self.copy_now(&copies)?.is_err() {
                    return self.cache.release(id).map_err(|error| error.to_string());
                }
                let tokens = self.sessions.saves[save].1.clone();
                self.revived(id, tokens);
                self.tally.see("loads", 1);
                Ok(())
            }
            Err(Error::OutOfBlocks { tier: Tier::Device, .. }) => {
                self.tally.see("refused: loads without room", 1);
                Ok(())
            }
            Err(error) => Err(error.to_string()),
        }
    }

    pub(crate) fn forget(&mut self) -> Outcome {
        let key = self.any_key();
        self.remember(|| format!("forget {key:?}"));
        let deleted = self.drive.store.delete(&key);
        if self.judge(deleted)?.is_err() {
            self.sessions.possible(&key).push(None);
            return Ok(());
        }
        self.forget_doubtful();
        *self.sessions.possible(&key) = vec![None];
        if let Some((kept, _)) = self.sessions.kept.remove(&key) {
            self.forget_kept(kept);
            let is_read = self.late.iter().any(|late| late.source == Some(kept));
            ensure!(is_read || self.cache.revive(kept).is_err(), "what was forgotten is found");
        }
        Ok(())
    }

    /// Lets go of failed saves if the next process will find none of them.
    fn forget_doubtful(&mut self) {
        if self.drive.store.is_sure() {
            self.sessions.doubtful.drain(..).for_each(|kept| self.cache.forget(kept));
        }
    }

    pub(crate) fn check_any_key(&mut self) -> Outcome {
        let key = self.any_key();
        self.check_key(&key)
    }

    /// Reads what is kept under a key from where it lies.
    fn check_key(&mut self, key: &Key) -> Outcome {
        let Some(&(kept, save)) = self.sessions.kept.get(key) else { return Ok(()) };
        let described = self.cache.describe(kept).ok_or("what is kept cannot be written down")?;
        let names: Vec<_> = self.sessions.saves[save].1.all.iter().map(|token| token.name).collect();
        ensure!(
            described.len == names.len() as u64,
            "{} tokens are kept, not {}",
            described.len,
            names.len()
        );
        for (group, KeptGroup { left, spans, pages }) in (0..).map(GroupId).zip(&described.groups) {
            let spans: Vec<_> = spans.iter().map(|span| (span.first_page, span.skip, span.count)).collect();
            let mut rows = BTreeMap::<usize, Vec<(usize, u64)>>::new();
            let page_size = self.shape.group(group).page_size;
            for (token, page, row) in placed(&spans, left.after as usize, left.count as usize, page_size) {
                rows.entry(page).or_default().push((row, names[token]));
            }
            for (page, rows) in rows {
                let (KeptPage::Sealed(block) | KeptPage::Open(block, _)) = pages[page] else {
                    return Err(format!("page {page} of {key:?} has left, and is needed"));
                };
                self.check_page(group, block, &rows)?;
            }
        }
        Ok(())
    }

    /// The process is killed, or the power fails; another process takes over the disk.
    pub(crate) fn restart(&mut self) -> Outcome {
        let events = self.drive.disk.events();
        self.note(&events, false);
        let power = self.random.once_in(2);
        self.tally.see(if power { "restarts: after a loss of power" } else { "restarts: after a kill" }, 1);
        let (disk, random) = (&self.drive.disk, &mut self.random);
        let disk = if power { disk.power_lost(|| random.once_in(2)) } else { disk.killed() };
        self.die();
        self.sessions.kept.clear();
        self.sessions.doubtful.clear();
        if self.random.once_in(3) {
            self.shape.grow(&mut self.random);
            self.tally.see("restarts: with a larger disk tier", 1);
        }
        let Recovered { lost, .. } = self.open_drive(disk)?;
        self.cache = self.shape.cache(self.drive.store.geometry().arena());
        self.break_fence();
        ensure!(
            self.drive.conduct != Conduct::Works || lost.is_empty(),
            "{lost:?} are lost on a drive that works"
        );
        self.find_again()
    }

    /// Takes in what the store has kept, like the binding, and compares it with what may be there.
    fn find_again(&mut self) -> Outcome {
        let (mut found, mut shapes) = (Vec::new(), Vec::new());
        for (key, entry) in self.drive.store.entries() {
            let (shape, meta) = sequence::decode(&entry).ok_or_else(|| format!("{key:?} is no sequence"))?;
            let meta: [u8; 8] = meta.try_into().map_err(|meta| format!("{key:?} says {meta:?}"))?;
            found.push((key, u64::from_le_bytes(meta) as usize));
            shapes.push(shape);
        }
        let adopted = self.cache.adopt(&shapes);
        let mut lost = Vec::new();
        for ((key, save), adopted) in found.into_iter().zip(adopted) {
            let known = self.sessions.saves.get(save).is_some_and(|(of, _)| *of == key);
            ensure!(known, "{key:?} has save {save}, which was none of its own");
            match adopted {
                Ok(kept) => drop(self.sessions.kept.insert(key, (kept, save))),
                Err(error) => lost.push((key, error)),
            }
        }
        for (key, error) in lost {
            ensure!(self.drive.lied, "{key:?} is lost on a drive that did not lie: {error}");
            let deleted = self.drive.store.delete(&key);
            if self.judge(deleted)?.is_err() {
                // A cache does not open in this case, but it may the next time.
                return self.restart();
            }
        }
        for key in (0..KEYS).map(|key| vec![b'k', key as u8]) {
            let found = self.sessions.kept.get(&key).map(|(_, save)| *save);
            let possible = self.sessions.possible(&key);
            ensure!(
                possible.contains(&found) || self.drive.lied,
                "{key:?} has save {found:?}, not one of {possible:?}"
            );
            *possible = vec![found];
            let what = if found.is_some() { "restarts: keys found" } else { "restarts: keys without a save" };
            self.tally.see(what, 1);
            self.check_key(&key)?;
        }
        Ok(())
    }

    /// Forgets everything: this is another disk, on which nothing was kept.
    pub(crate) fn forget_history(&mut self) {
        self.sessions.possible.clear();
    }
}
