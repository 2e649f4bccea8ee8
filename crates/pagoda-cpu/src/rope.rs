//! Rotating queries back, so that spans that have moved can keep their keys as they are.

/// Rotary position embedding, as far as attention needs to know it.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Radians per position of every pair; the first `2 * len` elements of a row are rotated.
    pub inv_freq: Vec<f32>,
    /// Whether element `2 i` is paired with `2 i + 1`, and not `i` with `i + len`.
    pub interleaved: bool,
}

impl Rope {
    /// Fills `table` with the cosine and sine of `offset` positions for every pair.
    pub(crate) fn angles(&self, offset: u64, table: &mut Vec<(f32, f32)>) {
        table.clear();
        table.extend(self.inv_freq.iter().map(|&frequency| {
            let (sin, cos) = (offset as f64 * f64::from(frequency)).sin_cos();
            (cos as f32, sin as f32)
        }));
    }

    /// Rotates `row` back by the angles of `table`.
    pub(crate) fn rotate_back(&self, table: &[(f32, f32)], row: &mut [f32]) {
        for (i, &(cos, sin)) in table.iter().enumerate() {
            let (a, b) = if self.interleaved { (2 * i, 2 * i + 1) } else { (i, i + table.len()) };
            let (x, y) = (row[a], row[b]);
            row[a] = x * cos + y * sin;
            row[b] = y * cos - x * sin;
        }
    }
}
