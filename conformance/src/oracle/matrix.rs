//! Dense f64 matrices in row-major order, with the three products that the oracle needs.

/// `[rows, cols]`. A vector is one row.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Matrix {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) data: Vec<f64>,
}

impl Matrix {
    pub(crate) fn new(rows: usize, cols: usize, data: Vec<f64>) -> Self {
        assert_eq!(data.len(), rows * cols, "the values fill the matrix");
        Self { rows, cols, data }
    }

    pub(crate) fn zeros(rows: usize, cols: usize) -> Self {
        Self::new(rows, cols, vec![0.0; rows * cols])
    }

    /// A parameter of one or two dims.
    pub(crate) fn with_shape(shape: &[usize], data: Vec<f64>) -> Self {
        let cols = shape.last().copied().unwrap_or(1);
        let rows = shape.iter().rev().skip(1).product();
        Self::new(rows, cols, data)
    }

    pub(crate) fn row(&self, index: usize) -> &[f64] {
        &self.data[index * self.cols..(index + 1) * self.cols]
    }

    pub(crate) fn row_mut(&mut self, index: usize) -> &mut [f64] {
        &mut self.data[index * self.cols..(index + 1) * self.cols]
    }

    pub(crate) fn map(&self, f: impl Fn(f64) -> f64) -> Self {
        Self::new(
            self.rows,
            self.cols,
            self.data.iter().map(|&x| f(x)).collect(),
        )
    }

    pub(crate) fn zip(&self, other: &Self, f: impl Fn(f64, f64) -> f64) -> Self {
        assert_eq!(
            (self.rows, self.cols),
            (other.rows, other.cols),
            "equal shapes"
        );
        let pairs = self.data.iter().zip(&other.data);
        Self::new(
            self.rows,
            self.cols,
            pairs.map(|(&a, &b)| f(a, b)).collect(),
        )
    }

    pub(crate) fn add_assign(&mut self, other: &Self) {
        assert_eq!(
            (self.rows, self.cols),
            (other.rows, other.cols),
            "equal shapes"
        );
        for (a, b) in self.data.iter_mut().zip(&other.data) {
            *a += b;
        }
    }

    pub(crate) fn transposed(&self) -> Self {
        let mut out = Self::zeros(self.cols, self.rows);
        for r in 0..self.rows {
            for (c, &value) in self.row(r).iter().enumerate() {
                out.data[c * self.rows + r] = value;
            }
        }
        out
    }

    /// `self [n, k] x other [k, m]`.
    pub(crate) fn matmul(&self, other: &Self) -> Self {
        assert_eq!(self.cols, other.rows, "inner sizes");
        let mut out = Self::zeros(self.rows, other.cols);
        for r in 0..self.rows {
            let into = out.row_mut(r);
            for (k, &a) in self.row(r).iter().enumerate() {
                for (o, b) in into.iter_mut().zip(other.row(k)) {
                    *o += a * b;
                }
            }
        }
        out
    }

    /// `self [n, k] x other [m, k]^T`.
    pub(crate) fn matmul_transposed(&self, other: &Self) -> Self {
        self.matmul(&other.transposed())
    }

    /// `self [k, n]^T x other [k, m]`.
    pub(crate) fn transposed_matmul(&self, other: &Self) -> Self {
        self.transposed().matmul(other)
    }
}
