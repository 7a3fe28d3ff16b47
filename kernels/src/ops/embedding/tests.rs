use super::{EmbeddingDims, backward, forward, reference};
use crate::Cpu;
use crate::testing::{all_cpus, assert_close, assert_gradient, dot, random, wide};

#[test]
fn reference_backward_is_the_derivative() {
    let dims = EmbeddingDims::whole(4, 3, 2);
    let (table, dy, ids) = (wide(&random(1, 6)), wide(&random(2, 8)), [2, 0, 2, 2]);
    let dtable = reference::backward(&dims, &dy, &ids);
    assert_gradient("dtable", &table, &dtable, |t| {
        dot(&reference::forward(&dims, t, &ids), &dy)
    });
}

#[test]
fn repeated_ids_add_up_and_untouched_rows_stay() {
    for cpu in all_cpus() {
        for (tokens, vocab, width) in [(1, 1, 1), (200, 13, 70), (33, 97, 3), (0, 5, 8)] {
            let dims = EmbeddingDims::whole(tokens, vocab, width);
            let (table, dy) = (random(1, vocab * width), random(2, tokens * width));
            let ids: Vec<u32> = (0..tokens).map(|t| (t * t % vocab) as u32).collect();
            let mut y = vec![f32::NAN; tokens * width];
            forward(cpu, &dims, &table, &ids, &mut y);
            assert_close(
                "y",
                &y,
                &reference::forward(&dims, &wide(&table), &ids),
                0.0,
            );
            let mut dtable = vec![0.5; vocab * width];
            backward(cpu, &dims, &dy, &ids, &mut dtable);
            let expected: Vec<f64> = reference::backward(&dims, &wide(&dy), &ids)
                .iter()
                .map(|x| x + 0.5)
                .collect();
            assert_close("dtable", &dtable, &expected, 1e-6);
        }
    }
}

#[test]
#[should_panic(expected = "id 3 at 1 is not below the 3 rows")]
fn an_id_out_of_the_table_is_named() {
    let dims = EmbeddingDims::whole(2, 3, 2);
    forward(Cpu::new(1), &dims, &[0.0; 6], &[0, 3], &mut [0.0; 4]);
}

#[test]
fn shards_of_the_table_sum_to_the_whole() {
    let (tokens, vocab, width) = (40, 13, 5);
    let ids: Vec<u32> = (0..tokens).map(|t| (t * t % vocab) as u32).collect();
    let (table, dy) = (random(1, vocab * width), random(2, tokens * width));
    let whole = EmbeddingDims::whole(tokens, vocab, width);
    for cpu in all_cpus() {
        for ends in [&[0, 7, 13][..], &[0, 5, 5, 9, 13]] {
            let (mut sum, mut gradient) = (vec![0.0; tokens * width], Vec::new());
            for pair in ends.windows(2) {
                let dims = EmbeddingDims {
                    first_id: pair[0],
                    rows: pair[1] - pair[0],
                    ..whole
                };
                let mut y = vec![f32::NAN; tokens * width];
                forward(
                    cpu,
                    &dims,
                    &table[pair[0] * width..pair[1] * width],
                    &ids,
                    &mut y,
                );
                sum.iter_mut().zip(&y).for_each(|(sum, y)| *sum += y);
                let mut dtable = vec![0.0; dims.rows * width];
                backward(cpu, &dims, &dy, &ids, &mut dtable);
                gradient.extend(dtable);
            }
            let (table, dy) = (wide(&table), wide(&dy));
            assert_close("y", &sum, &reference::forward(&whole, &table, &ids), 0.0);
            let expected = reference::backward(&whole, &dy, &ids);
            assert_close("dtable", &gradient, &expected, 1e-6);
        }
    }
}
