//! Adam (Kingma and Ba, arXiv 1412.6980) over a plain vector; its rate falls in a straight line to 0.

const MEANS: (f32, f32) = (0.9, 0.999);
const EPSILON: f32 = 1e-8;

/// A vector's optimizer.
pub struct Adam {
    rate: f32,
    n_steps: usize,
    step: usize,
    first: Vec<f32>,
    second: Vec<f32>,
}

impl Adam {
    /// For so many numbers and steps.
    pub fn new(n: usize, rate: f32, n_steps: usize) -> Self {
        Self {
            rate,
            n_steps,
            step: 0,
            first: vec![0.0; n],
            second: vec![0.0; n],
        }
    }

    /// Moves `x` against its gradient.
    pub fn step(&mut self, x: &mut [f32], gradient: &[f32]) {
        let rate = self.rate * (1.0 - self.step as f32 / self.n_steps.max(1) as f32).max(0.0);
        self.step += 1;
        let (a, b) = MEANS;
        let unbiased = |m: f32| 1.0 - m.powi(self.step as i32);
        let (ua, ub) = (unbiased(a), unbiased(b));
        let moments = self.first.iter_mut().zip(&mut self.second);
        for ((x, g), (m, v)) in x.iter_mut().zip(gradient).zip(moments) {
            *m = a.mul_add(*m, (1.0 - a) * g);
            *v = b.mul_add(*v, (1.0 - b) * g * g);
            *x -= rate * (*m / ua) / ((*v / ub).sqrt() + EPSILON);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_step_is_the_rate_and_a_bowl_s_bottom_is_found() {
        let mut x = [3.0f32, -2.0];
        let mut adam = Adam::new(2, 0.1, 1000);
        let gradient = |x: [f32; 2]| [2.0 * (x[0] - 1.0), 200.0 * (x[1] - 0.5)];
        adam.step(&mut x, &gradient([3.0, -2.0]));
        assert!(
            (x[0] - 2.9).abs() < 1e-6 && (x[1] + 1.9).abs() < 1e-6,
            "{x:?}"
        );
        for _ in 1..1000 {
            let g = gradient(x);
            adam.step(&mut x, &g);
        }
        assert!(
            (x[0] - 1.0).abs() < 1e-2 && (x[1] - 0.5).abs() < 1e-2,
            "{x:?}"
        );
    }
}
