//! Pages that several sequences of a batch hold: attention reads them once for the queries of all these sequences, and then
//! each sequence's own pages.

use std::ops::Range;

use pagoda_core::common::Commons;

/// Common pages in one step, and whose queries attend to them. Grows as needed.
#[derive(Debug, Default)]
pub struct Shared {
    pub(crate) nodes: Vec<Node>,
    /// The rows in the batch of the queries of each node.
    pub(crate) rows: Vec<u32>,
    /// For each sequence the token after its common pages.
    pub(crate) ends: Vec<usize>,
    /// For each sequence the number of nodes that it takes part in.
    depths: Vec<usize>,
}

/// Consecutive common pages.
#[derive(Debug)]
pub(crate) struct Node {
    /// How many nodes come before it, for the sequences that take part.
    pub(crate) level: usize,
    /// One of these sequences.
    pub(crate) sequence: usize,
    pub(crate) tokens: Range<usize>,
    /// Their queries: a part of [`Shared::rows`].
    pub(crate) queries: Range<usize>,
    /// The number of these sequences.
    members: usize,
}

impl Shared {
    /// Takes over what was found. `bounds`: where the new tokens of each sequence begin, and where the last one's end.
    pub fn fill(&mut self, commons: &Commons, bounds: &[u32]) {
        self.nodes.clear();
        self.rows.clear();
        for of_sequences in [&mut self.ends, &mut self.depths] {
            of_sequences.clear();
            of_sequences.resize(bounds.len() - 1, 0);
        }
        for node in &commons.nodes {
            let (members, first) = (&commons.members[node.members.clone()], self.rows.len());
            let (sequence, tokens) = (members[0] as usize, &node.tokens);
            let level = self.depths[sequence];
            for place in members.iter().map(|&place| place as usize) {
                self.rows.extend(bounds[place]..bounds[place + 1]);
                self.ends[place] = tokens.end as usize;
                self.depths[place] = level + 1;
            }
            self.nodes.push(Node {
                level,
                sequence,
                tokens: tokens.start as usize..tokens.end as usize,
                queries: first..self.rows.len(),
                members: members.len(),
            });
        }
    }

    /// Whether nothing is common, or this is for a batch of `sequences` sequences.
    pub(crate) fn is_of(&self, sequences: usize) -> bool {
        self.nodes.is_empty() || self.ends.len() == sequences
    }

    /// The number of passes over common pages: each takes the nodes of one level.
    pub(crate) fn levels(&self) -> usize {
        self.nodes.iter().map(|node| node.level + 1).max().unwrap_or(0)
    }

    /// Rows of one head that are not read again, for all sequences but the first that have them.
    pub fn spared_rows(&self) -> usize {
        self.nodes.iter().map(|node| node.tokens.len() * (node.members - 1)).sum()
    }
}
