//! Reverse-mode differentiation: every operation leaves its value and a closure that carries its gradient
//! back to its inputs.

use std::sync::Arc;

use super::matrix::Matrix;

/// A value on the tape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Var(usize);

type Backward = Box<dyn Fn(&Tape, &Matrix, &mut Gradients)>;

struct Node {
    value: Arc<Matrix>,
    backward: Option<Backward>,
}

/// Operations in the order they were made.
#[derive(Default)]
pub(crate) struct Tape {
    nodes: Vec<Node>,
    /// What an engine keeps for backward.
    kept: Vec<Var>,
}

/// Gradients by value; a value that nothing reached has none.
#[derive(Debug)]
pub(crate) struct Gradients(Vec<Option<Matrix>>);

impl Tape {
    /// A value that is given.
    pub(crate) fn leaf(&mut self, value: Arc<Matrix>) -> Var {
        self.nodes.push(Node {
            value,
            backward: None,
        });
        Var(self.nodes.len() - 1)
    }

    /// A value that an operation made, with how its gradient reaches the inputs.
    pub(crate) fn push(
        &mut self,
        value: Matrix,
        backward: impl Fn(&Tape, &Matrix, &mut Gradients) + 'static,
    ) -> Var {
        self.nodes.push(Node {
            value: Arc::new(value),
            backward: Some(Box::new(backward)),
        });
        Var(self.nodes.len() - 1)
    }

    pub(crate) fn value(&self, var: Var) -> &Matrix {
        &self.nodes[var.0].value
    }

    /// Notes that an engine keeps this value for backward.
    pub(crate) fn keep(&mut self, var: Var) -> Var {
        self.kept.push(var);
        var
    }

    /// Lets backward see kept values rounded, once nothing forward reads them any more.
    pub(crate) fn round_kept(&mut self, round: fn(f64) -> f64) {
        for var in std::mem::take(&mut self.kept) {
            let value = &mut self.nodes[var.0].value;
            *value = Arc::new(value.map(round));
        }
    }

    /// Carries these gradients of some values back to every leaf.
    pub(crate) fn backward(&self, seeds: Vec<(Var, Matrix)>) -> Gradients {
        let mut gradients = Gradients(vec![None; self.nodes.len()]);
        for (var, seed) in seeds {
            gradients.add(var, seed);
        }
        for (index, node) in self.nodes.iter().enumerate().rev() {
            if let Some(backward) = &node.backward
                && let Some(gradient) = gradients.0[index].take()
            {
                backward(self, &gradient, &mut gradients);
            }
        }
        gradients
    }
}

impl Gradients {
    pub(crate) fn add(&mut self, var: Var, gradient: Matrix) {
        match &mut self.0[var.0] {
            Some(sum) => sum.add_assign(&gradient),
            empty => *empty = Some(gradient),
        }
    }

    pub(crate) fn take(&mut self, var: Var) -> Option<Matrix> {
        self.0[var.0].take()
    }
}
