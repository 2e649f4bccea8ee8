//! Sequences that are kept on disk under a key.

use crate::cache::{Inner, handle, sequence_id};
use crate::errors;
use crate::moves::Link;
use pagoda_core::ids::KeptId;
use pagoda_store::disk::{Error, Recovered, Store, sequence};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What is kept under each key, and what the caller added.
#[derive(Default)]
pub(crate) struct Sessions {
    pub(crate) kept: BTreeMap<String, (KeptId, Vec<u8>)>,
    /// What was not as it had been left when the store was opened, and why.
    pub(crate) lost: Vec<(String, String)>,
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
        let store = self.named_store(py, key)?;
        self.zero();
        let (kept, copies) = self.core.keep(sequence_id(id)).map_err(|error| errors::core(py, &error))?;
        let (blocks, entry) = sequence::encode(&self.core.describe(kept).expect("kept right now"), meta);
        let put = self.copy_now(py, &copies, link).and_then(|()| {
            py.detach(|| store.put(key.as_bytes(), &blocks, &entry)).map_err(|error| errors::disk(py, &error))
        });
        if let Err(error) = put {
            self.core.forget(kept);
            return Err(error);
        }
        if let Some((before, _)) = self.sessions.kept.insert(key.into(), (kept, meta.to_vec())) {
            self.core.forget(before);
        }
        self.trim();
        Ok(())
    }

    /// A sequence with what is kept under `key`; none if nothing is.
    pub(crate) fn load(&mut self, py: Python<'_>, key: &str, link: Link<'_, '_>) -> PyResult<Option<u64>> {
        self.named_store(py, key)?;
        let Some(&(kept, _)) = self.sessions.kept.get(key) else { return Ok(None) };
        self.zero();
        let (id, copies) = self.core.revive(kept).map_err(|error| errors::core(py, &error))?;
        if let Err(error) = self.copy_now(py, &copies, link) {
            self.core.release(id).map_err(|error| errors::core(py, &error))?;
            return Err(error);
        }
        Ok(Some(handle(id)))
    }

    /// Lets go of what is kept under `key`; says whether there was something.
    pub(crate) fn forget(&mut self, py: Python<'_>, key: &str) -> PyResult<bool> {
        let store = self.named_store(py, key)?;
        store.delete(key.as_bytes()).map_err(|error| errors::disk(py, &error))?;
        let Some((kept, _)) = self.sessions.kept.remove(key) else { return Ok(false) };
        self.core.forget(kept);
        self.trim();
        Ok(true)
    }

    pub(crate) fn named_store(&self, py: Python<'_>, key: &str) -> PyResult<Arc<Store>> {
        let store = self.store().filter(|store| store.is_named());
        let limit = "nothing is kept but in a cache with disk= and resume=True";
        store.cloned().ok_or_else(|| errors::invalid(py, "key", format_args!("{key:?}"), limit))
    }
}
