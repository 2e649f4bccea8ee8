//! Sequences that are kept on disk under a key.

use crate::cache::{Inner, handle, sequence_id};
use crate::errors;
use crate::moves::{Held, Link};
use crate::patience::Apart;
use pagoda_core::fence::Failure;
use pagoda_core::ids::KeptId;
use pagoda_store::disk::{Error, Recovered, Store, sequence};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What is kept under each key, and what the caller added.
#[derive(Default)]
pub(crate) struct Sessions {
    pub(crate) kept: BTreeMap<String, (KeptId, Vec<u8>)>,
    /// Saves that were given up and that the drive may still carry out.
    unanswered: Vec<Save>,
    /// What was not as it had been left when the store was opened, and why.
    pub(crate) lost: Vec<(String, String)>,
}

/// A line of the index under way.
struct Save {
    key: String,
    kept: KeptId,
    meta: Vec<u8>,
    answer: Apart<Result<(), Error>>,
}

impl Sessions {
    /// Takes in what a store has kept. What is impossible is forgotten.
    pub(crate) fn open(
        core: &mut pagoda_core::Cache,
        store: &Store,
        recovered: Recovered,
    ) -> Result<Self, Error> {
        let name = |key: &[u8]| String::from_utf8_lossy(key).into_owned();
        let mut sessions = Self::default();
        sessions.lost.extend(recovered.lost.iter().map(|(key, why)| (name(key), why.clone())));
        let entries = store.entries();
        let decoded = entries.iter().map(|(key, entry)| (key, sequence::decode(entry)));
        let (known, unknown): (Vec<_>, Vec<_>) = decoded.partition(|(_, decoded)| decoded.is_some());
        let mut bad: Vec<_> =
            unknown.into_iter().map(|(key, _)| (key, "not a sequence".to_owned())).collect();
        let (keys, known): (Vec<_>, Vec<_>) =
            known.into_iter().map(|(key, decoded)| (key, decoded.expect("partitioned"))).unzip();
        let (shapes, metas): (Vec<_>, Vec<_>) = known.into_iter().unzip();
        for ((key, adopted), meta) in keys.into_iter().zip(core.adopt(&shapes)).zip(metas) {
            match (adopted, String::from_utf8(key.clone())) {
                (Ok(id), Ok(key)) => drop(sessions.kept.insert(key, (id, meta))),
                (Ok(id), Err(_)) => {
                    core.forget(id);
                    bad.push((key, "its key is not text".into()));
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

impl Inner {
    /// Keeps a sequence whose sealed pages are on disk under `key`, in the place of what was there.
    pub(crate) fn save(
        &mut self,
        py: Python<'_>,
        id: u64,
        key: &str,
        meta: &[u8],
        link: Link<'_, '_>,
    ) -> PyResult<()> {
        let (store, limit) = self.answering_store(py, key)?;
        self.zero();
        // A sequence of its own: open pages stay what they are as long as they are copied.
        let own = self.core.fork(sequence_id(id)).map_err(|error| errors::core(py, &error))?;
        let mut held = Held { sequence: Some(own), kept: None };
        let (kept, copies) = match self.core.keep(own) {
            Ok(keeping) => keeping,
            Err(error) => {
                self.let_go(held).map_err(|error| errors::core(py, &error))?;
                return Err(errors::core(py, &error));
            }
        };
        held.kept = Some(kept);
        self.copy_now(py, &copies, held, link)?;
        let described = self.core.describe(kept).expect("kept right now");
        self.let_go(Held { kept: None, ..held }).map_err(|error| errors::core(py, &error))?;
        let (blocks, entry) = sequence::encode(&described, meta);
        // Whoever comes first decides whether the key changes: the thread, once the pages are safe, or who gives up waiting.
        let decided = Arc::new(AtomicBool::new(false));
        let (to, at, first) = (store.clone(), key.as_bytes().to_vec(), decided.clone());
        let put = move || {
            let wanted = || !first.swap(true, Ordering::Relaxed);
            to.put_if(&at, &blocks, &entry, wanted).map(drop)
        };
        let answer = Apart::begin(put).map_err(|source| {
            self.core.forget(kept);
            errors::disk(py, &Error::Io { operation: "starting a thread", source })
        })?;
        let mut save = Save { key: key.into(), kept, meta: meta.to_vec(), answer };
        if let Err(stop) = py.detach(|| save.answer.wait(&store, limit)) {
            decided.store(true, Ordering::Relaxed);
            self.sessions.unanswered.push(save);
            return Err(stop.raise(py));
        }
        self.end_save(save).map_err(|error| errors::disk(py, &error))
    }

    /// A save whose last line the drive has answered.
    fn end_save(&mut self, Save { key, kept, meta, answer }: Save) -> Result<(), Error> {
        if let Err(error) = answer.join() {
            self.core.forget(kept);
            return Err(error);
        }
        if let Some((before, _)) = self.sessions.kept.insert(key, (kept, meta)) {
            self.core.forget(before);
        }
        self.trim();
        Ok(())
    }

    /// Ends saves that were given up, where the drive has answered since.
    pub(crate) fn end_saves(&mut self) {
        let answered = self.sessions.unanswered.extract_if(.., |save| save.answer.has_ended());
        for save in answered.collect::<Vec<_>>() {
            // Who asked for it has had an error already.
            let _ = self.end_save(save);
        }
    }

    /// A sequence with what is kept under `key`; none if nothing is.
    pub(crate) fn load(&mut self, py: Python<'_>, key: &str, link: Link<'_, '_>) -> PyResult<Option<u64>> {
        self.answering_store(py, key)?;
        let Some(&(kept, _)) = self.sessions.kept.get(key) else { return Ok(None) };
        self.zero();
        let (id, copies) = self.core.revive(kept).map_err(|error| errors::core(py, &error))?;
        self.copy_now(py, &copies, Held { sequence: Some(id), kept: None }, link)?;
        Ok(Some(handle(id)))
    }

    /// Lets go of what is kept under `key`; says whether there was something.
    pub(crate) fn forget(&mut self, py: Python<'_>, key: &str) -> PyResult<bool> {
        let (store, _) = self.answering_store(py, key)?;
        store.delete(key.as_bytes()).map_err(|error| errors::disk(py, &error))?;
        let Some((kept, _)) = self.sessions.kept.remove(key) else { return Ok(false) };
        self.core.forget(kept);
        self.trim();
        Ok(true)
    }

    /// The store, and how long anybody waits for it; refused while the drive has yet to answer for a key.
    fn answering_store(&self, py: Python<'_>, key: &str) -> PyResult<(Arc<Store>, Duration)> {
        let store = self.named_store(py, key)?;
        if self.sessions.unanswered.iter().any(|save| save.key == key) {
            let reason = format!("{key:?}: the drive has yet to answer an earlier save");
            return Err(errors::failure(py, Some(&Failure::Io(reason))));
        }
        Ok((store, self.disk_timeout()))
    }

    pub(crate) fn named_store(&self, py: Python<'_>, key: &str) -> PyResult<Arc<Store>> {
        let store = self.store().filter(|store| store.is_named());
        let limit = "nothing is kept but in a cache with disk= and resume=True";
        store.cloned().ok_or_else(|| errors::invalid(py, "key", format_args!("{key:?}"), limit))
    }
}
