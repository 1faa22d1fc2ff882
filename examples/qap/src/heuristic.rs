//! A good permutation before the proof begins: Taillard's robust tabu search.

use crate::instance::{Cost, Instance, Solution};

/// How long to search, and from where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TabuOptions {
    /// Exchanges of two facilities in each run.
    pub exchanges: u32,
    /// Runs from different permutations.
    pub runs: u32,
    /// Equal seeds give equal results.
    pub seed: u64,
}

impl TabuOptions {
    /// Finds the optimum of all embedded instances.
    pub const DEFAULT: Self = Self {
        exchanges: 3_000,
        runs: 8,
        seed: 1,
    };
}

/// Returns the best permutation that the search finds.
pub fn tabu_search(instance: &Instance, options: TabuOptions) -> Solution {
    let mut random = SplitMix(options.seed);
    let identity: Vec<u8> = (0..instance.size() as u8).collect();
    let mut best = Solution {
        value: instance.evaluate(&identity),
        permutation: identity,
    };
    for _ in 0..options.runs {
        let mut run = Run::new(instance, &mut random);
        for exchange in 0..options.exchanges {
            if !run.exchange(exchange, &mut random) {
                break;
            }
        }
        if run.best.value < best.value {
            best = run.best;
        }
    }
    best
}

/// Numbers that look random (SplitMix64).
struct SplitMix(u64);

impl SplitMix {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let mixed = (mixed ^ (mixed >> 31)) >> 32;
        ((mixed * u64::from(limit)) >> 32) as u32
    }
}

struct Run<'a> {
    instance: &'a Instance,
    permutation: Vec<u8>,
    value: Cost,
    best: Solution,
    /// Number of the exchange before which a facility may not return to a location, by location
    /// and facility.
    tabu_until: Vec<u32>,
}

impl<'a> Run<'a> {
    fn new(instance: &'a Instance, random: &mut SplitMix) -> Self {
        let size = instance.size();
        let mut permutation: Vec<u8> = (0..size as u8).collect();
        for last in (1..size).rev() {
            permutation.swap(last, random.below(last as u32 + 1) as usize);
        }
        let value = instance.evaluate(&permutation);
        Self {
            instance,
            value,
            best: Solution {
                value,
                permutation: permutation.clone(),
            },
            permutation,
            tabu_until: vec![0; size * size],
        }
    }

    /// Carries out the best exchange that is not tabu, or one that gives a new best value.
    /// Returns whether there was one.
    fn exchange(&mut self, now: u32, random: &mut SplitMix) -> bool {
        let size = self.instance.size();
        let mut chosen: Option<(Cost, usize, usize)> = None;
        for r in 0..size {
            for s in r + 1..size {
                let change = self.change(r, s);
                let is_best = self.value + change < self.best.value;
                if !is_best && (self.is_tabu(r, s, now) && self.is_tabu(s, r, now)) {
                    continue;
                }
                if chosen.is_none_or(|(least, ..)| change < least) {
                    chosen = Some((change, r, s));
                }
            }
        }
        let Some((change, r, s)) = chosen else {
            return self.is_waiting(now);
        };
        let tenure = size as u32;
        for location in [r, s] {
            let until = now + tenure * 9 / 10 + random.below(tenure / 4 + 2);
            let facility = usize::from(self.permutation[location]);
            self.tabu_until[location * size + facility] = until;
        }
        self.permutation.swap(r, s);
        self.value += change;
        if self.value < self.best.value {
            self.best.value = self.value;
            self.best.permutation.clone_from(&self.permutation);
        }
        true
    }

    /// Returns whether some exchange is tabu now and will not be later.
    fn is_waiting(&self, now: u32) -> bool {
        self.tabu_until.iter().any(|&until| until > now)
    }

    /// Returns whether the facility of location `from` may not go to `to`.
    fn is_tabu(&self, from: usize, to: usize, now: u32) -> bool {
        let facility = usize::from(self.permutation[from]);
        self.tabu_until[to * self.instance.size() + facility] > now
    }

    /// Returns how the value changes if two locations exchange their facilities.
    fn change(&self, r: usize, s: usize) -> Cost {
        let a = |i, j| Cost::from(self.instance.first(i, j));
        let b = |p: u8, q: u8| Cost::from(self.instance.second(usize::from(p), usize::from(q)));
        let (p, q) = (self.permutation[r], self.permutation[s]);
        let mut change =
            (a(r, r) - a(s, s)) * (b(q, q) - b(p, p)) + (a(r, s) - a(s, r)) * (b(q, p) - b(p, q));
        for (k, &t) in self.permutation.iter().enumerate() {
            if k != r && k != s {
                change += (a(k, r) - a(k, s)) * (b(t, q) - b(t, p))
                    + (a(r, k) - a(s, k)) * (b(q, t) - b(p, t));
            }
        }
        change
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nugent::{INSTANCES, find};

    #[test]
    fn finds_the_optimum_of_the_embedded_instances() {
        for nugent in INSTANCES
            .iter()
            .filter(|nugent| nugent.instance().size() <= 20)
        {
            let instance = nugent.instance();
            let solution = tabu_search(&instance, TabuOptions::DEFAULT);
            assert_eq!(solution.value, instance.evaluate(&solution.permutation));
            assert_eq!(solution.value, nugent.optimum, "{}", nugent.name);
        }
    }

    #[test]
    fn equal_seeds_give_equal_permutations() {
        let instance = find("nug14").expect("an embedded instance").instance();
        let options = TabuOptions {
            exchanges: 50,
            runs: 1,
            seed: 7,
        };
        assert_eq!(
            tabu_search(&instance, options),
            tabu_search(&instance, options)
        );
    }

    #[test]
    fn changes_are_those_of_the_value_also_for_asymmetric_data() {
        let entries = |factor: i32| {
            (0..36)
                .map(|index| index * factor % 23)
                .collect::<Vec<i32>>()
        };
        let instance = Instance::new(6, entries(7), entries(5)).expect("small entries");
        let mut random = SplitMix(3);
        let mut run = Run::new(&instance, &mut random);
        for number in 0..200 {
            run.exchange(number, &mut random);
            assert_eq!(run.value, instance.evaluate(&run.permutation));
        }
    }

    #[test]
    fn a_single_location_has_no_exchange() {
        let instance = Instance::new(1, vec![3], vec![4]).expect("small entries");
        assert_eq!(tabu_search(&instance, TabuOptions::DEFAULT).value, 12);
    }
}
