//! Counts of what happened.

use pagoda_store::disk::Error;
use pagoda_store::disk::io::fault::{Cause, Event, Fault, Site};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::fmt;

/// What became of faults of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fate {
    /// How often it happened.
    pub happened: u64,
    /// How often the call succeeded nevertheless, as it must if an operation is cut short or interrupted.
    pub absorbed: u64,
    /// How often the call returned a typed error.
    pub refused: u64,
    /// Reads of wrong bytes that it caused, at once or later.
    pub wrong_reads: u64,
    /// How many of these reads the store refused.
    pub noticed: u64,
}

/// Counts of one simulation, or of many.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Operations by name.
    pub operations: BTreeMap<&'static str, u64>,
    /// Other events of interest, by name.
    pub seen: BTreeMap<&'static str, u64>,
    /// Faults by name.
    pub faults: BTreeMap<String, Fate>,
}

impl Tally {
    /// The number of operations of all names.
    pub fn operation_count(&self) -> u64 {
        self.operations.values().sum()
    }

    /// Reads of wrong bytes. Each was noticed, or the simulation would have failed.
    pub fn wrong_reads(&self) -> u64 {
        self.faults.values().map(|fate| fate.wrong_reads).sum()
    }

    pub(crate) fn see(&mut self, what: &'static str, count: u64) {
        *self.seen.entry(what).or_default() += count;
    }

    fn fate(&mut self, cause: Cause) -> &mut Fate {
        self.faults.entry(name(cause)).or_default()
    }

    /// Notes what happened to the disk in a call, and whether the call noticed.
    pub(crate) fn note(&mut self, events: &[Event], refused: bool) {
        for event in events {
            match *event {
                Event::Happened(cause) => {
                    let silent = !matches!(cause, Cause::Fault(fault, _) if fault.is_honest());
                    let fate = self.fate(cause);
                    fate.happened += 1;
                    fate.refused += u64::from(refused && !silent);
                    fate.absorbed += u64::from(!refused && !silent);
                }
                Event::WrongBytes(cause) => {
                    let fate = self.fate(cause);
                    fate.wrong_reads += 1;
                    fate.noticed += u64::from(refused);
                }
            }
        }
    }

    /// Adds another tally.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in [(&mut self.operations, &other.operations), (&mut self.seen, &other.seen)] {
            theirs.iter().for_each(|(name, count)| *mine.entry(name).or_default() += count);
        }
        for (name, fate) in &other.faults {
            let mine = self.faults.entry(name.clone()).or_default();
            mine.happened += fate.happened;
            mine.absorbed += fate.absorbed;
            mine.refused += fate.refused;
            mine.wrong_reads += fate.wrong_reads;
            mine.noticed += fate.noticed;
        }
    }
}

/// Why a call of the store was refused, in two words.
pub(crate) fn kind(error: &Error) -> &'static str {
    match error {
        Error::Io { .. } => "errors: I/O",
        Error::Corrupt { .. } => "errors: corrupt page",
        Error::Index(_) => "errors: index",
        Error::Unsynced { .. } => "errors: lost by a sync",
        Error::Locked => "errors: locked",
        _ => "errors: other",
    }
}

fn name(cause: Cause) -> String {
    let (fault, site) = match cause {
        Cause::Spoilt(why) => return why.into(),
        Cause::Fault(fault, site) => (fault, site),
    };
    let what = match fault {
        Fault::Errno(errno) => return format!("{}: {}", site_name(site), errno_name(errno)),
        Fault::Short => "half is done, and said so",
        // A sync that lies in any way has done nothing.
        Fault::Lost | Fault::Torn | Fault::Flip | Fault::Misdirected if site == Site::Sync => {
            "nothing is done"
        }
        Fault::Lost => "nothing is done",
        Fault::Torn => "half is done",
        Fault::Flip => "one bit is another",
        Fault::Misdirected => "4 KiB further on",
    };
    format!("{}: {what}", site_name(site))
}

fn errno_name(errno: i32) -> &'static str {
    match Errno::from_raw_os_error(errno) {
        Errno::IO => "EIO",
        Errno::NOSPC => "ENOSPC",
        Errno::INTR => "EINTR",
        Errno::AGAIN => "EAGAIN",
        Errno::NOMEM => "ENOMEM",
        _ => "another errno",
    }
}

fn site_name(site: Site) -> &'static str {
    match site {
        Site::Open => "opening",
        Site::Zero => "pages zeroed",
        Site::Read => "pages read",
        Site::Write => "pages written",
        Site::Sync => "sync",
        Site::IndexRead => "index read",
        Site::IndexWrite => "index line written",
        Site::IndexReplace => "index replaced",
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, count) in self.operations.iter().chain(&self.seen) {
            writeln!(f, "{count:>12}  {name}")?;
        }
        writeln!(f, "    happened    absorbed     refused wrong reads     noticed")?;
        for (name, fate) in &self.faults {
            let Fate { happened, absorbed, refused, wrong_reads, noticed } = fate;
            writeln!(f, "{happened:>12}{absorbed:>12}{refused:>12}{wrong_reads:>12}{noticed:>12}  {name}")?;
        }
        Ok(())
    }
}
