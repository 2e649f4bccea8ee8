//! Sequences that are kept on disk under keys.

use crate::cache::{Cache, Inner};
use crate::errors;
use crate::handle::Handle;
use crate::moves::{Held, Link};
use crate::patience::Apart;
use pagoda_core::fence::Failure;
use pagoda_core::ids::{GroupId, KeptId, SequenceId, Tier};
use pagoda_store::disk::{Error, Recovered, Store, sequence};
use pyo3::prelude::*;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Of a key, which has at least one. Calls refuse all others: entries under them could be neither loaded nor forgotten.
pub(crate) const KEY_BYTES_MAX: usize = 1024;

/// What is kept under each key, and what the caller added.
#[derive(Default)]
pub(crate) struct Sessions {
    pub(crate) kept: BTreeMap<String, (KeptId, Vec<u8>)>,
    /// Changes whose call has given up, and which the drive may still carry out.
    unanswered: Vec<Change>,
    /// Saves that failed but that the next process may find all the same: their pages stay until the index says otherwise.
    doubtful: Vec<KeptId>,
    /// Keys that were not found as they had been left when the store was opened, and why.
    pub(crate) lost: Vec<(String, String)>,
}

/// A line that is being written to the index.
struct Change {
    key: String,
    /// What the key stands for afterwards; None if it is forgotten.
    to: Option<(KeptId, Vec<u8>)>,
    /// `Sessions::doubtful` when the change began.
    doubtful: Vec<KeptId>,
    answer: Apart<Answer>,
}

/// The outcome of a change.
struct Answer {
    result: Result<(), Error>,
    /// Whether writing its line was begun: if not, nobody finds it.
    begun: bool,
    /// Whether the index is known to be what it should be.
    is_sure: bool,
}

impl Sessions {
    /// Whether the drive has answered all changes.
    pub(crate) fn answered(&self) -> bool {
        self.unanswered.iter().all(|change| change.answer.has_ended())
    }

    /// Takes over what a store has kept. Invalid entries are deleted.
    pub(crate) fn open(
        core: &mut pagoda_core::Cache,
        store: &Store,
        recovered: Recovered,
    ) -> Result<Self, Error> {
        let name = |key: &[u8]| String::from_utf8_lossy(key).into_owned();
        let mut sessions = Self::default();
        sessions.lost.extend(recovered.lost.iter().map(|(key, why)| (name(key), why.clone())));
        let entries = store.entries();
        let (mut named, mut sequences, mut bad) = (Vec::new(), Vec::new(), Vec::new());
        for (key, entry) in &entries {
            if let Some((kept, meta)) = sequence::decode(entry) {
                named.push((key, meta));
                sequences.push(kept);
            } else {
                bad.push((key, "not a sequence".to_owned()));
            }
        }
        for ((key, meta), adopted) in named.into_iter().zip(core.adopt(&sequences)) {
            match (adopted, String::from_utf8(key.clone())) {
                (Ok(id), Ok(key)) if (1..=KEY_BYTES_MAX).contains(&key.len()) => {
                    sessions.kept.insert(key, (id, meta));
                }
                (Ok(id), _) => {
                    core.forget(id);
                    bad.push((key, format!("its key is not a text of 1 to {KEY_BYTES_MAX} bytes")));
                }
                (Err(error), _) => bad.push((key, error.to_string())),
            }
        }
        for (key, why) in bad {
            store.delete(key)?;
            sessions.lost.push((name(key), why));
        }
        Ok(sessions)
    }
}

#[pymethods]
impl Cache {
    /// Refuses a `save` before any page is written: if the cache keeps nothing, if the index has no room for it, or if the
    /// drive has not yet answered an earlier change of the key.
    fn check_save(&self, py: Python<'_>, sequence: u64, key: &str, meta_bytes: usize) -> PyResult<()> {
        let inner = self.lock(py)?;
        let store = inner.answering_store(py, key)?;
        let outline =
            inner.core.outline(SequenceId::of_number(sequence)).map_err(|error| errors::core(py, &error))?;
        let (blocks, entry) = sequence::encode(&outline, &[]);
        let room = store.require_room(key.as_bytes(), blocks.len(), entry.len() + meta_bytes);
        room.map_err(|error| errors::disk(py, store.directory(), &error))
    }

    /// Keeps a sequence, whose sealed pages are on disk, under `key`. Replaces what was there.
    #[pyo3(signature = (sequence, key, meta, link=None))]
    fn save(
        &self,
        py: Python<'_>,
        sequence: u64,
        key: &str,
        meta: &[u8],
        link: Link<'_, '_>,
    ) -> PyResult<()> {
        let mut inner = self.lock(py)?;
        let store = inner.answering_store(py, key)?;
        inner.zero(py)?;
        // A fork, so that open pages do not change while they are copied.
        let own =
            inner.core.fork(SequenceId::of_number(sequence)).map_err(|error| errors::core(py, &error))?;
        let mut held = Held { sequence: Some(own), ..Held::default() };
        let (kept, copies) = match inner.core.keep(own) {
            Ok(keeping) => keeping,
            Err(error) => {
                inner.let_go(held).map_err(|error| errors::core(py, &error))?;
                return Err(errors::core(py, &error));
            }
        };
        held.kept = Some(kept);
        inner.copy_now(py, &copies, held, link).map_err(|unmade| unmade.raise(py, &inner.core))?;
        let described = inner.core.describe(kept).expect("kept right now");
        inner.let_go(Held { kept: None, ..held }).map_err(|error| errors::core(py, &error))?;
        let (blocks, entry) = sequence::encode(&described, meta);
        let saved = inner.change(py, &store, key, Some((kept, meta.to_vec())), move |store, key, wanted| {
            store.put_if(key, &blocks, &entry, wanted).map(drop)
        });
        if saved.is_err() {
            // Pages that are in memory too are written again next time.
            inner.drop_lost(py, &store)?;
        }
        saved
    }

    /// A new sequence with what is kept under `key`; None if nothing is.
    #[pyo3(signature = (key, link=None))]
    fn load(&self, py: Python<'_>, key: &str, link: Link<'_, '_>) -> PyResult<Option<Handle>> {
        let mut inner = self.lock(py)?;
        self.release_abandoned(py, &mut inner)?;
        inner.answering_store(py, key)?;
        let Some(&(kept, _)) = inner.sessions.kept.get(key) else { return Ok(None) };
        inner.zero(py)?;
        let (id, copies) = inner.core.revive(kept).map_err(|error| errors::core(py, &error))?;
        let held = Held { sequence: Some(id), source: Some(kept), kept: None };
        inner.copy_now(py, &copies, held, link).map_err(|unmade| unmade.raise(py, &inner.core))?;
        Ok(Some(Handle::new(id, &self.abandoned)))
    }

    /// Forgets what is kept under `key`; returns whether there was anything.
    fn forget(&self, py: Python<'_>, key: &str) -> PyResult<bool> {
        let mut inner = self.lock(py)?;
        let store = inner.answering_store(py, key)?;
        let is_kept = inner.sessions.kept.contains_key(key);
        inner.change(py, &store, key, None, |store, key, wanted| store.delete_if(key, wanted).map(drop))?;
        Ok(is_kept)
    }

    /// The keys under which something is kept, and what the caller added.
    fn saved(&self, py: Python<'_>) -> PyResult<BTreeMap<String, Vec<u8>>> {
        self.with(py, |inner| {
            let kept = inner.sessions.kept.iter();
            Ok(kept.map(|(key, (_, meta))| (key.clone(), meta.clone())).collect())
        })
    }

    /// What the caller added to what is kept under a key; None if there is nothing.
    fn meta(&self, py: Python<'_>, key: &str) -> PyResult<Option<Vec<u8>>> {
        self.with(py, |inner| Ok(inner.sessions.kept.get(key).map(|(_, meta)| meta.clone())))
    }

    /// Keys that were lost when the cache was opened, and why.
    fn lost(&self, py: Python<'_>) -> PyResult<Vec<(String, String)>> {
        self.with(py, |inner| Ok(inner.sessions.lost.clone()))
    }
}

impl Inner {
    /// Changes what a key stands for in a thread, and waits for the drive's answer.
    fn change(
        &mut self,
        py: Python<'_>,
        store: &Arc<Store>,
        key: &str,
        to: Option<(KeptId, Vec<u8>)>,
        line: impl FnOnce(&Store, &[u8], &dyn Fn() -> bool) -> Result<(), Error> + Send + 'static,
    ) -> PyResult<()> {
        // Whoever sets this first decides whether the key changes: the thread, after everything else, or the waiter that
        // gives up.
        let decided = Arc::new(AtomicBool::new(false));
        let (writer, at, first) = (store.clone(), key.as_bytes().to_vec(), decided.clone());
        let answer = Apart::begin(move || {
            let begun = Cell::new(false);
            let result = line(&writer, &at, &|| {
                begun.set(!first.swap(true, Ordering::Relaxed));
                begun.get()
            });
            Answer { result, begun: begun.get(), is_sure: writer.is_sure() }
        });
        let answer = answer.map_err(|source| {
            to.iter().for_each(|&(kept, _)| self.core.forget(kept));
            errors::disk(py, store.directory(), &Error::Io { operation: "starting a thread", source })
        })?;
        let (doubtful, limit) = (self.sessions.doubtful.clone(), self.disk_timeout());
        let mut change = Change { key: key.into(), to, doubtful, answer };
        if let Err(stop) = py.detach(|| change.answer.wait(store, limit)) {
            decided.store(true, Ordering::Relaxed);
            self.sessions.unanswered.push(change);
            return Err(stop.raise(py));
        }
        let ended = self.end_change(change);
        self.trim(py)?;
        ended.map_err(|error| errors::disk(py, store.directory(), &error))
    }

    /// Finishes a change that the drive has answered.
    fn end_change(&mut self, Change { key, to, mut doubtful, answer }: Change) -> Result<(), Error> {
        let Answer { result, begun, is_sure } = answer.join();
        let gone = match (&result, to) {
            (Ok(()), Some(now)) => self.sessions.kept.insert(key, now),
            (Ok(()), None) => self.sessions.kept.remove(&key),
            (Err(_), Some((kept, _))) if begun => {
                doubtful.push(kept);
                self.sessions.doubtful.push(kept);
                None
            }
            (Err(_), to) => to,
        };
        gone.into_iter().for_each(|(kept, _)| self.forget_kept(kept));
        if is_sure {
            // The index has been written since these failed, so they cannot be found any more. The list may also have saves
            // that failed after that but were waited for earlier; they stay.
            let known =
                self.sessions.doubtful.extract_if(.., |kept| doubtful.contains(kept)).collect::<Vec<_>>();
            known.into_iter().for_each(|kept| self.core.forget(kept));
        }
        result
    }

    /// Finishes changes whose call has given up, once the drive has answered.
    pub(crate) fn end_changes(&mut self) {
        let answered = self.sessions.unanswered.extract_if(.., |change| change.answer.has_ended());
        for change in answered.collect::<Vec<_>>() {
            // The caller has had an error already.
            let _ = self.end_change(change);
        }
    }

    /// Drops copies on disk that a failed sync may have lost, of pages that are also in memory.
    fn drop_lost(&mut self, py: Python<'_>, store: &Store) -> PyResult<()> {
        for group in (0..store.geometry().groups() as u8).map(GroupId) {
            let lost = |_, block| store.may_have_lost(group, block);
            self.core.drop_copies_if(Tier::Disk, group, usize::MAX, lost);
        }
        self.trim(py)
    }

    /// The store; refuses as long as the drive has not answered an earlier change of the key.
    fn answering_store(&self, py: Python<'_>, key: &str) -> PyResult<Arc<Store>> {
        let store = self.named_store(py, key)?;
        if self.sessions.unanswered.iter().any(|change| change.key == key) {
            let directory = store.directory().display();
            let reason =
                format!("disk = {directory}: {key:?}: the drive has yet to answer an earlier save or forget");
            return Err(errors::failure(py, &Failure::Io(reason), &[]));
        }
        Ok(store)
    }

    fn named_store(&self, py: Python<'_>, key: &str) -> PyResult<Arc<Store>> {
        let store = self.store().filter(|store| store.is_named());
        let limit = "nothing is kept but in a cache with disk= and resume=True";
        store.cloned().ok_or_else(|| errors::invalid(py, "key", format_args!("{key:?}"), limit))
    }
}
