//! The operations of a transformer on the tape, each with its derivative beside it.

use std::ops::Range;

use super::{
    matrix::Matrix,
    tape::{Tape, Var},
};

impl Tape {
    /// `x [n, k] x w [m, k]^T`: a linear layer in Hugging Face's layout.
    pub(crate) fn linear(&mut self, x: Var, w: Var) -> Var {
        let y = self.value(x).matmul_transposed(self.value(w));
        self.push(y, move |tape, dy, grads| {
            grads.add(x, dy.matmul(tape.value(w)));
            grads.add(w, dy.transposed_matmul(tape.value(x)));
        })
    }

    /// `a [n, k] x b [k, m]`.
    pub(crate) fn matmul(&mut self, a: Var, b: Var) -> Var {
        let y = self.value(a).matmul(self.value(b));
        self.push(y, move |tape, dy, grads| {
            grads.add(a, dy.matmul_transposed(tape.value(b)));
            grads.add(b, tape.value(a).transposed_matmul(dy));
        })
    }

    pub(crate) fn add(&mut self, a: Var, b: Var) -> Var {
        let y = self.value(a).zip(self.value(b), |a, b| a + b);
        self.push(y, move |_, dy, grads| {
            grads.add(a, dy.clone());
            grads.add(b, dy.clone());
        })
    }

    /// Adds one row to every row.
    pub(crate) fn add_bias(&mut self, x: Var, bias: Var) -> Var {
        let mut y = self.value(x).clone();
        for r in 0..y.rows {
            let bias = self.value(bias).data.iter();
            y.row_mut(r).iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
        self.push(y, move |_, dy, grads| {
            let mut sum = Matrix::zeros(1, dy.cols);
            for r in 0..dy.rows {
                let row = dy.row(r).iter();
                sum.data.iter_mut().zip(row).for_each(|(s, d)| *s += d);
            }
            grads.add(x, dy.clone());
            grads.add(bias, sum);
        })
    }

    /// Element by element.
    pub(crate) fn multiply(&mut self, a: Var, b: Var) -> Var {
        let y = self.value(a).zip(self.value(b), |a, b| a * b);
        self.push(y, move |tape, dy, grads| {
            grads.add(a, dy.zip(tape.value(b), |d, b| d * b));
            grads.add(b, dy.zip(tape.value(a), |d, a| d * a));
        })
    }

    pub(crate) fn scale(&mut self, x: Var, factor: f64) -> Var {
        let y = self.value(x).map(|x| x * factor);
        self.push(y, move |_, dy, grads| {
            grads.add(x, dy.map(|d| d * factor));
        })
    }

    /// `x sigmoid(x)`.
    pub(crate) fn silu(&mut self, x: Var) -> Var {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let y = self.value(x).map(|x| x * sigmoid(x));
        self.push(y, move |tape, dy, grads| {
            let slope = |x: f64| sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)));
            grads.add(x, dy.zip(tape.value(x), |d, x| d * slope(x)));
        })
    }

    /// `w x / sqrt(mean(x^2) + eps)` over every run of `w`'s length within a row (a row, or a head).
    pub(crate) fn rms_norm(&mut self, x: Var, w: Var, eps: f64) -> Var {
        let width = self.value(w).data.len();
        let inverse_rms = move |x: &[f64]| {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            1.0 / (mean + eps).sqrt()
        };
        let mut y = self.value(x).clone();
        for run in y.data.chunks_exact_mut(width) {
            let r = inverse_rms(run);
            let weights = self.value(w).data.iter();
            run.iter_mut().zip(weights).for_each(|(x, w)| *x *= r * w);
        }
        self.push(y, move |tape, dy, grads| {
            let (x_value, w_value) = (tape.value(x), &tape.value(w).data);
            let mut dx = Matrix::zeros(x_value.rows, x_value.cols);
            let mut dw = Matrix::zeros(tape.value(w).rows, tape.value(w).cols);
            for ((x, dy), dx) in x_value
                .data
                .chunks_exact(width)
                .zip(dy.data.chunks_exact(width))
                .zip(dx.data.chunks_exact_mut(width))
            {
                let r = inverse_rms(x);
                let dot: f64 = (0..width).map(|i| dy[i] * w_value[i] * x[i]).sum();
                for i in 0..width {
                    dw.data[i] += dy[i] * x[i] * r;
                    dx[i] = r * dy[i] * w_value[i] - r.powi(3) * x[i] * dot / width as f64;
                }
            }
            grads.add(x, dx);
            grads.add(w, dw);
        })
    }

    /// Rotates pairs (i, i + E/2) of every head of `head_dim` = E by the row's angles. `cos` and `sin` are
    /// `[rows, E/2]` and already scaled.
    pub(crate) fn rotate(&mut self, x: Var, head_dim: usize, cos: Matrix, sin: Matrix) -> Var {
        let rotated = move |x: &Matrix, sign: f64| {
            let half = head_dim / 2;
            let mut y = x.clone();
            for r in 0..x.rows {
                for head in y.row_mut(r).chunks_exact_mut(head_dim) {
                    for i in 0..half {
                        let (c, s) = (cos.row(r)[i], sign * sin.row(r)[i]);
                        let (a, b) = (head[i], head[i + half]);
                        head[i] = a * c - b * s;
                        head[i + half] = b * c + a * s;
                    }
                }
            }
            y
        };
        let y = rotated(self.value(x), 1.0);
        self.push(y, move |_, dy, grads| grads.add(x, rotated(dy, -1.0)))
    }

    /// A rectangle of `x`.
    pub(crate) fn slice(&mut self, x: Var, rows: Range<usize>, cols: Range<usize>) -> Var {
        let source = self.value(x);
        let (height, width) = (source.rows, source.cols);
        let data = rows.clone().flat_map(|r| &source.row(r)[cols.clone()]);
        let y = Matrix::new(rows.len(), cols.len(), data.copied().collect());
        self.push(y, move |_, dy, grads| {
            let mut dx = Matrix::zeros(height, width);
            for (i, r) in rows.clone().enumerate() {
                dx.row_mut(r)[cols.clone()].copy_from_slice(dy.row(i));
            }
            grads.add(x, dx);
        })
    }

    /// Lays rectangles, each with its top left corner, into a matrix of zeros.
    pub(crate) fn stitch(
        &mut self,
        rows: usize,
        cols: usize,
        parts: Vec<(usize, usize, Var)>,
    ) -> Var {
        let mut y = Matrix::zeros(rows, cols);
        for &(top, left, part) in &parts {
            let part = self.value(part);
            for r in 0..part.rows {
                y.row_mut(top + r)[left..left + part.cols].copy_from_slice(part.row(r));
            }
        }
        self.push(y, move |tape, dy, grads| {
            for &(top, left, part) in &parts {
                let (height, width) = (tape.value(part).rows, tape.value(part).cols);
                let data = (top..top + height).flat_map(|r| &dy.row(r)[left..left + width]);
                grads.add(part, Matrix::new(height, width, data.copied().collect()));
            }
        })
    }

    /// Softmax over each row's allowed columns, 0 elsewhere; every row allows at least one.
    pub(crate) fn softmax_where(&mut self, x: Var, allowed: impl Fn(usize, usize) -> bool) -> Var {
        let mut y = self.value(x).clone();
        for r in 0..y.rows {
            let row = y.row_mut(r);
            for (c, x) in row.iter_mut().enumerate() {
                if !allowed(r, c) {
                    *x = f64::NEG_INFINITY;
                }
            }
            let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            row.iter_mut().for_each(|x| *x = (*x - max).exp());
            let sum: f64 = row.iter().sum();
            row.iter_mut().for_each(|x| *x /= sum);
        }
        let saved = y.clone();
        self.push(y, move |_, dy, grads| {
            let mut dx = saved.clone();
            for r in 0..dx.rows {
                let dot: f64 = saved.row(r).iter().zip(dy.row(r)).map(|(p, d)| p * d).sum();
                let row = dx.row_mut(r).iter_mut().zip(dy.row(r));
                row.for_each(|(p, d)| *p *= d - dot);
            }
            grads.add(x, dx);
        })
    }

    /// Log-softmax over each row.
    pub(crate) fn log_softmax(&mut self, x: Var) -> Var {
        let mut y = self.value(x).clone();
        for r in 0..y.rows {
            let row = y.row_mut(r);
            let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
            row.iter_mut().for_each(|x| *x -= max + sum.ln());
        }
        let saved = y.clone();
        self.push(y, move |_, dy, grads| {
            let mut dx = dy.clone();
            for r in 0..dx.rows {
                let sum: f64 = dy.row(r).iter().sum();
                let row = dx.row_mut(r).iter_mut().zip(saved.row(r));
                row.for_each(|(d, log_p)| *d -= log_p.exp() * sum);
            }
            grads.add(x, dx);
        })
    }

    /// Entropy in nats of each row of log-probs, `[n, 1]`.
    pub(crate) fn entropy(&mut self, log_probs: Var) -> Var {
        let source = self.value(log_probs);
        let of = |row: &[f64]| -row.iter().map(|l| l.exp() * l).sum::<f64>();
        let data = (0..source.rows).map(|r| of(source.row(r))).collect();
        let y = Matrix::new(source.rows, 1, data);
        self.push(y, move |tape, dy, grads| {
            let mut dx = tape.value(log_probs).clone();
            for r in 0..dx.rows {
                let d = dy.data[r];
                let row = dx.row_mut(r).iter_mut();
                row.for_each(|l| *l = -d * l.exp() * (*l + 1.0));
            }
            grads.add(log_probs, dx);
        })
    }

    /// `columns[r]` of each row r, `[n, k]`.
    pub(crate) fn pick(&mut self, x: Var, columns: Vec<Vec<usize>>) -> Var {
        let (rows, cols) = (self.value(x).rows, self.value(x).cols);
        let k = columns.first().map_or(1, Vec::len);
        let picked = (0..rows).flat_map(|r| columns[r].iter().map(move |&c| (r, c)));
        let data = picked.map(|(r, c)| self.value(x).row(r)[c]).collect();
        let y = Matrix::new(rows, k, data);
        self.push(y, move |_, dy, grads| {
            let mut dx = Matrix::zeros(rows, cols);
            for (r, columns) in columns.iter().enumerate() {
                for (&c, d) in columns.iter().zip(dy.row(r)) {
                    dx.row_mut(r)[c] += d;
                }
            }
            grads.add(x, dx);
        })
    }

    /// Divides each row by its sum.
    pub(crate) fn normalise_rows(&mut self, x: Var) -> Var {
        let mut y = self.value(x).clone();
        for r in 0..y.rows {
            let sum: f64 = y.row(r).iter().sum();
            y.row_mut(r).iter_mut().for_each(|x| *x /= sum);
        }
        let saved = y.clone();
        self.push(y, move |tape, dy, grads| {
            let mut dx = dy.clone();
            for r in 0..dx.rows {
                let sum: f64 = tape.value(x).row(r).iter().sum();
                let dot: f64 = saved.row(r).iter().zip(dy.row(r)).map(|(y, d)| y * d).sum();
                dx.row_mut(r).iter_mut().for_each(|d| *d = (*d - dot) / sum);
            }
            grads.add(x, dx);
        })
    }

    /// These rows of `x`, in this order; a row may come more than once (an embedding look-up).
    pub(crate) fn gather_rows(&mut self, x: Var, rows: Vec<usize>) -> Var {
        let source = self.value(x);
        let (height, width) = (source.rows, source.cols);
        let data = rows.iter().flat_map(|&r| source.row(r)).copied().collect();
        let y = Matrix::new(rows.len(), width, data);
        self.push(y, move |_, dy, grads| {
            grads.add(x, scattered(dy, &rows, height));
        })
    }

    /// A matrix of `height` rows to whose row `rows[i]` row i of `x` is added.
    pub(crate) fn scatter_rows(&mut self, x: Var, rows: Vec<usize>, height: usize) -> Var {
        let y = scattered(self.value(x), &rows, height);
        self.push(y, move |_, dy, grads| {
            let data = rows.iter().flat_map(|&r| dy.row(r)).copied().collect();
            grads.add(x, Matrix::new(rows.len(), dy.cols, data));
        })
    }

    /// Multiplies row r of `x` by element r of `factors [n, 1]`.
    pub(crate) fn scale_rows(&mut self, x: Var, factors: Var) -> Var {
        let scaled = |x: &Matrix, factors: &Matrix| {
            let mut y = x.clone();
            for r in 0..y.rows {
                y.row_mut(r).iter_mut().for_each(|y| *y *= factors.data[r]);
            }
            y
        };
        let y = scaled(self.value(x), self.value(factors));
        self.push(y, move |tape, dy, grads| {
            let x_value = tape.value(x);
            let dot = |r: usize| {
                x_value
                    .row(r)
                    .iter()
                    .zip(dy.row(r))
                    .map(|(x, d)| x * d)
                    .sum()
            };
            let data = (0..dy.rows).map(dot).collect();
            grads.add(factors, Matrix::new(dy.rows, 1, data));
            grads.add(x, scaled(dy, tape.value(factors)));
        })
    }
}

fn scattered(x: &Matrix, rows: &[usize], height: usize) -> Matrix {
    let mut y = Matrix::zeros(height, x.cols);
    for (i, &r) in rows.iter().enumerate() {
        let into = y.row_mut(r).iter_mut().zip(x.row(i));
        into.for_each(|(y, x)| *y += x);
    }
    y
}
