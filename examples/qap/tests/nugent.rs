//! Proofs of the embedded instances.

use proptest::prelude::*;
use sempa_qap::heuristic::{TabuOptions, tabu_search};
use sempa_qap::nugent::find;
use sempa_qap::proof::{FirstBound, Optimum, ProofOptions, solve};
use sempa_qap::search::{BoundKind, Directive, Search};

/// Proves an instance with both first bounds. Returns the nodes of the proof that begins with
/// the optimum.
fn prove(name: &str, bound: BoundKind) -> u64 {
    let nugent = find(name).expect("an embedded instance");
    let instance = nugent.instance();
    let options = ProofOptions {
        bound,
        first_bound: FirstBound::Heuristic(TabuOptions::DEFAULT),
    };
    let proof = solve(&instance, &options, |_| Directive::Continue)
        .expect("bounds fit, and nothing stops the search");
    let Optimum::Solution(solution) = &proof.optimum else {
        panic!("the tabu search gives a permutation");
    };
    assert_eq!(solution.value, nugent.optimum, "{name}");
    assert_eq!(
        instance.evaluate(&solution.permutation),
        nugent.optimum,
        "{name}"
    );
    let options = ProofOptions {
        bound,
        first_bound: FirstBound::Value(nugent.optimum),
    };
    let known = solve(&instance, &options, |_| Directive::Continue)
        .expect("bounds fit, and nothing stops the search");
    assert_eq!(known.optimum, Optimum::AtLeast(nugent.optimum));
    let found = tabu_search(&instance, TabuOptions::DEFAULT).value == nugent.optimum;
    assert!(
        !found || known.nodes == proof.nodes,
        "{name}: the same first value, the same tree"
    );
    known.nodes
}

#[test]
fn gilmore_lawler_proves_the_small_instances() {
    for name in ["nug12", "nug14", "nug15", "nug16b"] {
        let nodes = prove(name, BoundKind::GilmoreLawler);
        assert!(nodes < 400_000, "{name}: {nodes}");
    }
}

#[test]
fn hahn_grant_proves_the_small_instances_with_few_nodes() {
    for (name, limit) in [
        ("nug12", 400),
        ("nug14", 4_000),
        ("nug15", 3_000),
        ("nug16b", 5_000),
    ] {
        let nodes = prove(name, BoundKind::HahnGrant);
        assert!(nodes < limit, "{name}: {nodes}");
    }
}

#[test]
#[ignore = "system tier: a minute of processor time"]
fn both_bounds_prove_nug17() {
    for kind in [BoundKind::GilmoreLawler, BoundKind::HahnGrant] {
        prove("nug17", kind);
    }
}

#[test]
fn a_search_without_first_bound_finds_the_optimum() {
    let nugent = find("nug12").expect("an embedded instance");
    for bound in [BoundKind::GilmoreLawler, BoundKind::HahnGrant] {
        let options = ProofOptions {
            bound,
            first_bound: FirstBound::Value(1_000_000),
        };
        let proof = solve(&nugent.instance(), &options, |_| Directive::Continue)
            .expect("bounds fit, and nothing stops the search");
        assert_eq!(proof.optimum.value(), nugent.optimum);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn every_cut_of_nug12_counts_the_same_nodes(
        choices in proptest::collection::vec((any::<proptest::sample::Index>(), 1..90_u64), 1..40),
    ) {
        let nugent = find("nug12").expect("an embedded instance");
        for kind in [BoundKind::GilmoreLawler, BoundKind::HahnGrant] {
            let whole = solve(
                &nugent.instance(),
                &ProofOptions { bound: kind, first_bound: FirstBound::Value(nugent.optimum) },
                |_| Directive::Continue,
            ).expect("bounds fit, and nothing stops the search");
            // Two workers that take turns, as in a parallel proof.
            let mut workers = [(); 2].map(|()| Search::new(&nugent.instance(), kind).expect("bounds fit"));
            let mut open = vec![workers[0].root()];
            let mut nodes = 0;
            let mut turn = choices.iter().cycle();
            while !open.is_empty() {
                let (index, piece) = turn.next().expect("a cycle has no end");
                let node = open.swap_remove(index.index(open.len()));
                workers.swap(0, 1);
                let outcome = workers[0].search(&node, nugent.optimum, |done| {
                    if done < *piece { Directive::Continue } else { Directive::Stop }
                });
                nodes += outcome.nodes;
                open.extend(outcome.rest);
            }
            prop_assert_eq!(nodes, whole.nodes);
        }
    }
}
