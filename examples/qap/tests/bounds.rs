//! Proofs and counts of nodes for small instances, against trying all permutations.

use proptest::prelude::*;
use sempa_qap::instance::{Cost, Instance};
use sempa_qap::proof::{FirstBound, Optimum, ProofOptions, solve};
use sempa_qap::search::{BoundKind, Directive, Node, Placement, Search};

const KINDS: [BoundKind; 2] = [BoundKind::GilmoreLawler, BoundKind::HahnGrant];

/// Calls `visit` with every permutation that continues the first `fixed` entries.
fn permutations(permutation: &mut [u8], fixed: usize, visit: &mut impl FnMut(&[u8])) {
    if fixed == permutation.len() {
        return visit(permutation);
    }
    for other in fixed..permutation.len() {
        permutation.swap(fixed, other);
        permutations(permutation, fixed + 1, visit);
        permutation.swap(fixed, other);
    }
}

fn least_value(instance: &Instance, path: &[Placement]) -> Cost {
    let mut least = Cost::MAX;
    let mut permutation: Vec<u8> = (0..instance.size() as u8).collect();
    permutations(&mut permutation, 0, &mut |permutation| {
        let continues = |placement: &Placement| {
            permutation[usize::from(placement.location)] == placement.facility
        };
        if path.iter().all(continues) {
            least = least.min(instance.evaluate(permutation));
        }
    });
    least
}

/// Searches in pieces of at most `piece` nodes, always the piece that `choose` names.
fn search_in_pieces(
    search: &mut Search,
    best: Cost,
    mut choose: impl FnMut(usize) -> (usize, u64),
) -> (u64, Cost) {
    let mut open = vec![search.root()];
    let (mut nodes, mut best) = (0, best);
    while !open.is_empty() {
        let (index, piece) = choose(open.len());
        let node = open.swap_remove(index);
        let outcome = search.search(&node, best, |done| {
            if done < piece {
                Directive::Continue
            } else {
                Directive::Stop
            }
        });
        assert!(outcome.nodes <= piece);
        nodes += outcome.nodes;
        open.extend(outcome.rest);
        best = outcome.best.map_or(best, |solution| solution.value);
    }
    (nodes, best)
}

/// Matrices without symmetry, with an automorphism, or symmetric.
fn instances(sizes: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = Instance> {
    let entry = prop_oneof![3 => 0..12_i32, 1 => Just(0)];
    (sizes, 0..3_u8).prop_flat_map(move |(size, shape)| {
        let matrix = proptest::collection::vec(entry.clone(), size * size);
        (matrix.clone(), matrix).prop_map(move |(mut first, mut second)| {
            for row in 0..size {
                for column in 0..size {
                    let at = row * size + column;
                    match shape {
                        0 => {}
                        1 if row > column => {
                            first[at] = first[column * size + row];
                            second[at] = second[column * size + row];
                        }
                        1 => {}
                        // A ring: every rotation is an automorphism.
                        _ => first[at] = first[(column + size - row) % size],
                    }
                }
            }
            Instance::new(size, first, second).expect("small entries")
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn proves_the_least_value_of_all_permutations(instance in instances(1..=7)) {
        let expected = least_value(&instance, &[]);
        for bound in KINDS {
            for first in [Cost::MAX / 4, expected + 1] {
                let options = ProofOptions { bound, first_bound: FirstBound::Value(first) };
                let proof = solve(&instance, &options, |_| Directive::Continue).expect("bounds fit, and nothing stops the search");
                let Optimum::Solution(solution) = proof.optimum else {
                    panic!("{bound:?} finds nothing below {first}");
                };
                prop_assert_eq!(solution.value, expected);
                prop_assert_eq!(instance.evaluate(&solution.permutation), expected);
            }
            let options = ProofOptions { bound, first_bound: FirstBound::Value(expected) };
            let proof = solve(&instance, &options, |_| Directive::Continue).expect("bounds fit, and nothing stops the search");
            prop_assert_eq!(proof.optimum, Optimum::AtLeast(expected));
        }
    }

    /// Every child of every expanded node, at any depth, has a bound that no completion
    /// undercuts; and a placement that is missing has no improving completion.
    #[test]
    fn bounds_hold_at_every_partial_assignment(
        instance in instances(5..=6),
        above in 1..400 as Cost,
    ) {
        let optimum = least_value(&instance, &[]);
        for kind in KINDS {
            let mut search = Search::new(&instance, kind).expect("bounds fit");
            let mut open = vec![search.root()];
            while let Some(node) = open.pop() {
                let least = least_value(&instance, &node.path);
                prop_assert!(node.bound <= least, "{kind:?}: {node:?} has a completion of {least}");
                let outcome = search.search(&node, optimum + above, |done| {
                    if done == 0 { Directive::Continue } else { Directive::Stop }
                });
                if let Some(best) = outcome.best {
                    prop_assert_eq!(best.value, instance.evaluate(&best.permutation));
                } else if least < optimum + above && outcome.nodes == 1 {
                    let kept = outcome.rest.iter()
                        .map(|child| least_value(&instance, &child.path)).min();
                    let cheap = instance.evaluate(&(0..instance.size() as u8).collect::<Vec<u8>>());
                    prop_assert!(least > cheap || kept == Some(least), "{kind:?}: {node:?} loses {least}");
                }
                open.extend(outcome.rest);
            }
        }
    }

    #[test]
    fn every_cut_into_pieces_counts_the_same_nodes(
        instance in instances(7..=8),
        choices in proptest::collection::vec((any::<proptest::sample::Index>(), 1..6_u64), 1..60),
    ) {
        let expected = least_value(&instance, &[]);
        for kind in KINDS {
            let mut search = Search::new(&instance, kind).expect("bounds fit");
            let root = search.root();
            let whole = search.search(&root, expected, |_| Directive::Continue);
            prop_assert!(whole.rest.is_empty() && whole.best.is_none());
            let mut fresh = Search::new(&instance, kind).expect("bounds fit");
            let mut turn = choices.iter().cycle();
            let (nodes, best) = search_in_pieces(&mut fresh, expected, |open| {
                let (index, piece) = turn.next().expect("a cycle has no end");
                (index.index(open), *piece)
            });
            prop_assert_eq!((nodes, best), (whole.nodes, expected));
            let mut turn = choices.iter().cycle();
            let (_, best) = search_in_pieces(&mut fresh, Cost::MAX / 4, |open| {
                let (index, piece) = turn.next().expect("a cycle has no end");
                (index.index(open), *piece)
            });
            prop_assert_eq!(best, expected);
        }
    }
}

#[test]
fn a_value_from_elsewhere_ends_the_search() {
    let instance = sempa_qap::nugent::find("nug12")
        .expect("an embedded instance")
        .instance();
    for kind in KINDS {
        let mut search = Search::new(&instance, kind).expect("bounds fit");
        let root = search.root();
        let mut told = false;
        let outcome = search.search(&root, 1000, |nodes| {
            if nodes < 5 || told {
                return Directive::Continue;
            }
            told = true;
            Directive::Improved(1)
        });
        assert_eq!((outcome.nodes, outcome.rest), (5, vec![]), "{kind:?}");
    }
}

#[test]
fn nodes_survive_serialization_and_are_small() {
    let instance = sempa_qap::nugent::find("nug12")
        .expect("an embedded instance")
        .instance();
    let mut search = Search::new(&instance, BoundKind::HahnGrant).expect("bounds fit");
    let root = search.root();
    let outcome = search.search(&root, 578, |nodes| {
        if nodes < 7 {
            Directive::Continue
        } else {
            Directive::Stop
        }
    });
    assert!(!outcome.rest.is_empty());
    for node in outcome.rest {
        let bytes = postcard::to_stdvec(&node).expect("a node is data");
        assert!(
            bytes.len() <= 8 + 2 * node.path.len(),
            "{} bytes",
            bytes.len()
        );
        assert_eq!(
            postcard::from_bytes::<Node>(&bytes).expect("a node again"),
            node
        );
    }
}
