//! Everything that can go wrong, as data. Messages name the argument, the value and the limit.

use crate::ids::{GroupId, SequenceId, TicketId, Tier};

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call was refused. A refused call changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An argument has a value that the call does not accept.
    #[error("{argument} = {value}: {limit}")]
    InvalidArgument {
        /// Name of the argument.
        argument: &'static str,
        /// What was passed.
        value: String,
        /// What would have been accepted.
        limit: String,
    },
    /// A tier has too few free blocks.
    #[error(
        "out of blocks: tier {tier} lacks {blocks_short} block(s), {bytes_short} bytes; layer group {} is the first that is \
         short, and {draining} of its blocks are draining", group.0
    )]
    OutOfBlocks {
        /// The tier that is full.
        tier: Tier,
        /// The first layer group that is short.
        group: GroupId,
        /// Blocks missing; for a step, of all layer groups together.
        blocks_short: u64,
        /// Bytes missing.
        bytes_short: u64,
        /// Blocks of the group that will become free once their fences retire.
        draining: u64,
    },
    /// The sequence was released, or belongs to another cache.
    #[error("sequence = {id}: released, or not of this cache")]
    UseAfterRelease {
        /// The handle that was passed.
        id: SequenceId,
    },
    /// A copy between tiers failed. The pages stayed where they were.
    #[error("ticket {} failed after {copied} of {planned} copies: {reason}", ticket.index())]
    CopyFailed {
        /// The ticket.
        ticket: TicketId,
        /// Copies that arrived.
        copied: u32,
        /// Copies that were asked for.
        planned: u32,
        /// The sequences that hold the page of the first failed copy.
        sequences: Vec<SequenceId>,
        /// What the link said.
        reason: String,
    },
    /// A copy read bytes that differ from what was stored. The pages stayed where they were, and cannot be read there.
    #[error("ticket {} failed after {copied} of {planned} copies: {reason}", ticket.index())]
    CorruptPage {
        /// The ticket.
        ticket: TicketId,
        /// Copies that arrived.
        copied: u32,
        /// Copies that were asked for.
        planned: u32,
        /// The sequences that hold the page.
        sequences: Vec<SequenceId>,
        /// Which page, and what does not match.
        reason: String,
    },
    /// `audit` found the bookkeeping broken.
    #[error("invariant broken: {0}")]
    Invariant(String),
}

impl Error {
    pub(crate) fn invalid(argument: &'static str, value: impl ToString, limit: impl Into<String>) -> Self {
        Self::InvalidArgument { argument, value: value.to_string(), limit: limit.into() }
    }
}
