# One program a line, as in a table, whatever its length.
# ruff: noqa: E501
# fmt: off
"""Programs whose exact results ``generate.py`` takes from JAX: ``FAMILIES[family]`` is a list of
programs.

``program(name, expr, *arrays, **named)``: JAX source text over ``a0, a1, ...`` and ``kw_<name>``.
``ideal`` is an expression for the right answer where JAX raises or is wrong; ``error`` names the
exception that is right where JAX raises something accidental or nothing; ``crashes`` marks a
program that JAX 0.10 must not be asked (it may end the process).
"""

from typing import Any

import numpy as np

Program = dict[str, Any]


def program(
    name: str,
    expr: str,
    *arrays: Any,
    ideal: str | None = None,
    error: str | None = None,
    crashes: bool = False,
    **named: Any,
) -> Program:
    inputs = {f"a{i}": array for i, array in enumerate(arrays)}
    inputs |= {f"kw_{key}": value for key, value in named.items()}
    return {"id": name, "expr": expr, "inputs": inputs, "ideal": ideal, "error": error, "crashes": crashes}


def num(*shape: int, dtype: str = "float32", start: int = 3) -> np.ndarray:
    """Small numbers without a pattern that a wrong permutation could keep: exact in every dtype."""
    count = int(np.prod(shape))
    values = (np.arange(start, start + count) * 7) % 13 - 4
    if dtype == "bool":
        return (values % 3 == 0).reshape(shape)
    if dtype.startswith("uint"):
        return (values + 4).astype(dtype).reshape(shape)
    if dtype.startswith("complex"):
        return (values + 1j * values[::-1]).astype(dtype).reshape(shape)
    return (values / (2 if dtype.startswith("float") else 1)).astype(dtype).reshape(shape)


def brain(*shape: int) -> np.ndarray:
    import ml_dtypes  # comes with jax; only the generator gets here

    return num(*shape).astype(ml_dtypes.bfloat16)


X4 = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
W4 = np.array([1.0, 10.0, 100.0, 1000.0], np.float32)
TIED = np.array([2.0, 5.0, 1.0, 5.0], np.float32)
NAN = np.array([1.0, np.nan, 3.0, 2.0], np.float32)

ARGS = [
    program("half", "jax.pmap(lambda x: x*0.5)(a0)", num(4, 3, dtype="float16")),
    program("complex", "jax.pmap(lambda z: z*z+1)(a0)", num(3, 2, dtype="complex64")),
    program("uint8_wraps", "jax.pmap(lambda x: x*30)(a0)", num(2, 5, dtype="uint8")),
    program("bool_not", "jax.pmap(lambda b: ~b)(a0)", num(3, 2, dtype="bool")),
    program("float64", "jax.pmap(lambda x: x/3)(a0)", num(4, 2, dtype="float64")),
    program("bfloat16", "jax.pmap(lambda x: x+x)(a0)", brain(4, 2)),
    program("axes_tuple", "jax.pmap(lambda x,y,z: x+y*z, in_axes=(0,1,None))(a0,a1,a2)", *(num(3, 2), num(2, 3), num(2))),
    program("axes_in_list", "jax.pmap(lambda t: t[0]-t[1], in_axes=([0,1],))([a0,a1])", num(4, 2), num(2, 4, start=5)),
    program("axes_dict", "jax.pmap(lambda t: t['w']@t['x'], in_axes=({'w':None,'x':1},))({'w':a0,'x':a1})", num(2, 3), num(3, 4)),
    program("axes_3_2", "jax.pmap(lambda x: x*2, in_axes=3, out_axes=2)(a0)", num(2, 3, 2, 4)),
    program("out_axes_1", "jax.pmap(lambda x: x.T, out_axes=1)(a0)", num(4, 2, 3)),
    program("out_axes_tree", "jax.pmap(lambda x: (x,{'s':x*2,'m':lax.psum(x,'i')}), 'i', out_axes=(0,{'s':1,'m':None}))(a0)", num(4, 3)),
    program("out_empty_subtrees", "jax.pmap(lambda x: {'a':x,'b':None,'c':(),'d':[x+1]})(a0)", num(3)),
    program("none_argument", "jax.pmap(lambda x,n: (x+1,n), in_axes=(0,1))(a0,None)", num(4)),
    program("kwargs_are_axis_0", "jax.pmap(lambda x,*,y: x*y, in_axes=1)(a0,y=kw_y)", num(2, 3), y=num(3, 2, start=9)),
    program("kwargs_tree", "jax.pmap(lambda x,t: x+t['p']-t['q'][0])(a0,t={'p':a1,'q':[a2]})", num(4), num(4, start=6), num(4, start=1)),
    program("varargs_and_kwargs", "jax.pmap(lambda *xs,**ks: xs[0]-xs[1]+ks['z'])(a0,a1,z=a2)", num(2), num(2, start=5), num(2, start=8)),
    program("keyword_only_default", "jax.pmap(lambda x,*,k=2.0: x*k)(a0)", num(4, 2)),
    program("static_first", "jax.pmap(lambda op,x: {'dbl':x*2,'neg':-x}[op], static_broadcasted_argnums=0)('neg',a0)", num(4, 2)),
    program("static_two", "jax.pmap(lambda x,s,k: x.reshape(s)*len(k), static_broadcasted_argnums=(1,2))(a0,(3,2),'abc')", num(4, 6)),
    program("static_with_axes", "jax.pmap(lambda x,n,y: x*n+y, in_axes=(0,None,1), static_broadcasted_argnums=1)(a0,4,a1)", num(2, 3), num(3, 2)),
    program("closure", "(lambda w: jax.pmap(lambda x: x@w)(a0))(a1)", num(4, 2, 3), num(3, 2)),
    program("result_fed_back", "(lambda f: f(f(a0)))(jax.pmap(lambda x: x*2+1))", num(4, 3)),
    program("one_row", "jax.pmap(lambda x: x.sum())(a0)", num(1, 5)),
    program("params_tree", "jax.pmap(lambda p,x: x@p['w']+p['b'][0], in_axes=(None,0))({'w':a0,'b':[a1]},a2)", num(3, 2), num(2), num(4, 5, 3)),
    program("python_int", "jax.pmap(lambda x,n: x*n, in_axes=(0,None))(a0,3)", num(4, 2, dtype="int32")),
    program("constant_bool_out", "jax.pmap(lambda x: (x>0, True))(a0)", num(4)),
    program("axis_unused_argument", "jax.pmap(lambda x,y: x)(a0,a1)", num(4, 2), num(4, 7)),
    program("same_result_twice", "jax.pmap(lambda x: (lambda y: (y,y))(x*3))(a0)", num(4, 2)),
    program("empty_inner_dim", "jax.pmap(lambda x: x*2)(a0)", num(4, 0), ideal="np.zeros((4,0),np.float32)"),
    program("negative_in_axis", "jax.pmap(lambda x: x*2, in_axes=-1)(a0)", num(2, 3, 4), ideal="jax.vmap(lambda x: x*2, in_axes=-1)(a0)"),
    program("negative_in_axes_tree", "jax.pmap(lambda x,t: x+t['u'], in_axes=(-2,{'u':-1}))(a0,{'u':a1})", *(num(3, 2), num(2, 3)), ideal="jax.vmap(lambda x,t: x+t['u'], in_axes=(-2,{'u':-1}))(a0,{'u':a1})"),
    program("negative_out_axis", "jax.pmap(lambda x: x+1, out_axes=-2)(a0)", num(4, 2, 3), ideal="jax.vmap(lambda x: x+1, out_axes=-2)(a0)"),
    program("no_arguments", "jax.pmap(lambda: jnp.ones(2)*lax.axis_index('i'), axis_name='i', axis_size=3)()", ideal="jax.vmap(lambda: jnp.ones(2)*lax.axis_index('i'), axis_name='i', axis_size=3)()"),
]

COLLECTIVES = [
    program("psum_tree", "jax.pmap(lambda x: lax.psum({'a':x,'b':(x*2,x.sum())},'i'),'i')(a0)", num(3, 2)),
    program("psum_int8_wraps", "jax.pmap(lambda x: lax.psum(x*15,'i'),'i')(a0)", num(4, 3, dtype="int8")),
    program("psum_uint8", "jax.pmap(lambda x: lax.psum(x*10,'i'),'i')(a0)", num(4, 3, dtype="uint8")),
    program("psum_bool", "jax.pmap(lambda x: lax.psum(x,'i'),'i')(a0)", num(4, 3, dtype="bool")),
    program("psum_complex", "jax.pmap(lambda x: lax.psum(x,'i'),'i')(a0)", num(4, 2, dtype="complex64")),
    program("psum_bfloat16", "jax.pmap(lambda x: lax.psum(x,'i'),'i')(a0)", brain(4, 3)),
    program("psum_groups_order", "jax.pmap(lambda x: lax.psum(x,'i',axis_index_groups=[[3,0],[1,2]]),'i')(a0)", num(4, 2)),
    program("psum_groups_uneven", "jax.pmap(lambda x: lax.psum(x,'i',axis_index_groups=[[0],[1,2,3]]),'i')(a0)", num(4, 2)),
    program("psum_positional_first", "jax.pmap(lambda x: lax.psum(x,(0,'i')),'i')(a0)", num(4, 2, 3)),
    program("psum_one_tuple", "jax.pmap(lambda x: lax.psum(x,('i',)),'i')(a0)", num(4)),
    program("psum_no_axes", "jax.pmap(lambda x: lax.psum(x,()),'i')(a0)", num(4)),
    program("psum_one_is_int", "jax.pmap(lambda x: x.reshape(lax.psum(1,'i'),2),'i')(a0)", num(4, 8)),
    program("psum_twice", "jax.pmap(lambda x: lax.psum(lax.psum(x,'i')*x,'i'),'i')(a0)", num(4, 2)),
    program("pmean_int8", "jax.pmap(lambda x: lax.pmean(x,'i'),'i')(a0)", num(4, 3, dtype="int8")),
    program("pmean_bool", "jax.pmap(lambda x: lax.pmean(x,'i'),'i')(a0)", num(4, 3, dtype="bool")),
    program("pmean_constant", "jax.pmap(lambda x: x+lax.pmean(3.0,'i'),'i')(a0)", num(4)),
    program("pmean_tree_groups", "jax.pmap(lambda x: lax.pmean((x,[x*x]),'i',axis_index_groups=[[2,0],[3,1]]),'i')(a0)", num(4, 2)),
    program("pmax_groups_uneven", "jax.pmap(lambda x: lax.pmax(x,'i',axis_index_groups=[[0,3,1],[2]]),'i')(a0)", num(4, 3)),
    program("pmax_half", "jax.pmap(lambda x: lax.pmax(x,'i'),'i')(a0)", num(4, 3, dtype="float16")),
    program("pmax_bool", "jax.pmap(lambda x: lax.pmax(x,'i'),'i')(a0)", num(4, 3, dtype="bool")),
    program("pmin_uint8", "jax.pmap(lambda x: lax.pmin(x,'i'),'i')(a0)", num(3, 3, dtype="uint8")),
    program("pmin_int32_tree", "jax.pmap(lambda x: lax.pmin([x,-x],'i'),'i')(a0)", num(4, 2, 2, dtype="int32")),
    program("pmax_keeps_nan", "jax.pmap(lambda x: lax.pmax(x,'i'),'i')(a0)", NAN, ideal="jax.vmap(lambda x: lax.pmax(x,'i'),axis_name='i')(a0)"),
    program("pmin_keeps_nan", "jax.pmap(lambda x: lax.pmin(x,'i'),'i')(a0)", NAN, ideal="jax.vmap(lambda x: lax.pmin(x,'i'),axis_name='i')(a0)"),
    program("all_gather_last", "jax.pmap(lambda x: lax.all_gather(x,'i',axis=-1),'i')(a0)", num(3, 2, 2)),
    program("all_gather_axis2", "jax.pmap(lambda x: lax.all_gather(x,'i',axis=2),'i')(a0)", num(4, 2, 3)),
    program("all_gather_tiled_axis1", "jax.pmap(lambda x: lax.all_gather(x,'i',axis=1,tiled=True),'i')(a0)", num(3, 2, 3)),
    program("all_gather_groups", "jax.pmap(lambda x: lax.all_gather(x,'i',axis_index_groups=[[0,2],[3,1]]),'i')(a0)", num(4, 2)),
    program("all_gather_groups_tiled", "jax.pmap(lambda x: lax.all_gather(x,'i',axis=1,axis_index_groups=[[0,2],[3,1]],tiled=True),'i')(a0)", num(4, 2, 2)),
    program("all_gather_dtypes", "jax.pmap(lambda x: lax.all_gather((x.astype(jnp.int8),x.astype(jnp.complex64)),'i'),'i')(a0)", num(4, 2)),
    program("psum_scatter_dim1", "jax.pmap(lambda x: lax.psum_scatter(x,'i',scatter_dimension=1),'i')(a0)", num(3, 2, 3)),
    program("psum_scatter_tiled_dim1", "jax.pmap(lambda x: lax.psum_scatter(x,'i',scatter_dimension=1,tiled=True),'i')(a0)", num(2, 3, 4)),
    program("psum_scatter_groups_order", "jax.pmap(lambda x: lax.psum_scatter(x,'i',axis_index_groups=[[1,0],[2,3]]),'i')(a0)", num(4, 2, 3)),
    program("psum_scatter_negative_tiled", "jax.pmap(lambda x: lax.psum_scatter(x,'i',scatter_dimension=-1,tiled=True),'i')(a0)", num(2, 3, 4), ideal="jax.pmap(lambda x: lax.psum_scatter(x,'i',scatter_dimension=1,tiled=True),'i')(a0)"),
    program("all_to_all_split1_concat0", "jax.pmap(lambda x: lax.all_to_all(x,'i',1,0),'i')(a0)", num(3, 2, 3)),
    program("all_to_all_split2_concat0", "jax.pmap(lambda x: lax.all_to_all(x,'i',2,0),'i')(a0)", num(2, 3, 4, 2)),
    program("all_to_all_tiled_10", "jax.pmap(lambda x: lax.all_to_all(x,'i',1,0,tiled=True),'i')(a0)", num(2, 3, 4)),
    program("all_to_all_groups", "jax.pmap(lambda x: lax.all_to_all(x,'i',0,1,axis_index_groups=[[0,3],[2,1]]),'i')(a0)", num(4, 2, 3)),
    program("all_to_all_bool", "jax.pmap(lambda x: lax.all_to_all(x,'i',0,0),'i')(a0)", num(4, 4, dtype="bool")),
    program("all_to_all_int32", "jax.pmap(lambda x: lax.all_to_all(x,'i',0,0,tiled=True),'i')(a0)", num(3, 6, dtype="int32")),
    program("all_to_all_negative_axes", "jax.pmap(lambda x: lax.all_to_all(x,'i',-1,-2,tiled=True),'i')(a0)", num(2, 3, 4), ideal="jax.pmap(lambda x: lax.all_to_all(x,'i',1,0,tiled=True),'i')(a0)", crashes=True),
    program("pswapaxes_1", "jax.pmap(lambda x: lax.pswapaxes(x,'i',1),'i')(a0)", num(3, 2, 3)),
    program("ppermute_partial", "jax.pmap(lambda x: lax.ppermute(x,'i',[(0,3),(2,1)]),'i')(a0)", num(4, 2)),
    program("ppermute_int_rotation", "jax.pmap(lambda x: lax.ppermute(x,'i',[(i,(i+2)%3) for i in range(3)]),'i')(a0)", num(3, 2, dtype="int32")),
    program("ppermute_bool_missing", "jax.pmap(lambda x: lax.ppermute(x|True,'i',[(1,2)]),'i')(a0)", num(4, dtype="bool")),
    program("ppermute_tree", "jax.pmap(lambda x: lax.ppermute({'a':x,'b':[x*2]},'i',[(0,1),(1,0)]),'i')(a0)", num(2, 3)),
    program("ppermute_to_itself", "jax.pmap(lambda x: lax.ppermute(x,'i',[(0,0),(1,2),(2,1),(3,3)]),'i')(a0)", num(4)),
    program("ppermute_negative_both", "jax.pmap(lambda x: lax.ppermute(x,'i',[(-1,-2)]),'i')(a0)", num(4)),
    program("pshuffle", "jax.pmap(lambda x: lax.pshuffle(x,'i',[2,0,3,1]),'i')(a0)", num(4, 2)),
    program("pbroadcast", "jax.pmap(lambda x: lax.pbroadcast(x,'i',2),'i')(a0)", num(4, 3), ideal="np.stack([a0[2]]*4)"),
    program("axis_index_in_value", "jax.pmap(lambda x: x*lax.axis_index('i'),'i')(a0)", num(4, 2)),
    program("axis_index_tuple", "jax.pmap(lambda x: lax.axis_index(('i',)),'i')(a0)", num(3)),
    program("axis_size_in_shape", "jax.pmap(lambda x: jnp.ones((lax.axis_size('i'),2))*x,'i')(a0)", num(3)),
    program("mean_axis_and_dim", "jax.pmap(lambda x: jnp.mean(x,axis=('i',0)),'i')(a0)", num(4, 2, 3)),
    program("max_axis", "jax.pmap(lambda x: jnp.max(x,axis='i'),'i')(a0)", num(4, 3)),
    program("standardise", "jax.pmap(lambda x: (x-lax.pmean(x,'i'))/jnp.sqrt(lax.pmean((x-lax.pmean(x,'i'))**2,'i')+1e-3),'i')(a0)", num(4, 3)),
    program("log_softmax_axis", "jax.pmap(lambda x: jax.nn.log_softmax(x,axis='i'),'i')(a0)", num(4, 3)),
    program("sharded_matmul", "jax.pmap(lambda a,b: lax.psum(a@b,'i'),'i',in_axes=(1,0))(a0,a1)", num(3, 4, 2), num(4, 2, 5)),
    program("halo_exchange", "jax.pmap(lambda u: lax.fori_loop(0,3,lambda k,u: u+0.25*(jnp.concatenate([lax.ppermute(u[-1:],'i',[(0,1),(1,2),(2,3)]),u[:-1]])-2*u+jnp.concatenate([u[1:],lax.ppermute(u[:1],'i',[(1,0),(2,1),(3,2)])])),u),'i')(a0)", num(4, 5)),
    program("ring_all_reduce", "jax.pmap(lambda x: lax.fori_loop(0,3,lambda k,s: (lax.ppermute(s[0],'i',[(i,(i+1)%4) for i in range(4)]),s[1]+lax.ppermute(s[0],'i',[(i,(i+1)%4) for i in range(4)])),(x,x))[1],'i')(a0)", num(4, 2)),
    program("psum_in_scan", "jax.pmap(lambda xs: lax.scan(lambda c,x: (c+lax.psum(x,'i'),c*x),xs[0],xs),'i')(a0)", num(4, 3)),
    program("vmap_inside", "jax.pmap(jax.vmap(lambda x: x-lax.pmean(x,'i')),'i')(a0)", num(4, 3, 2)),
    program("vmap_inside_ppermute", "jax.pmap(jax.vmap(lambda x: lax.ppermute(x,'i',[(0,1),(1,2)]),in_axes=1,out_axes=1),'i')(a0)", num(3, 2, 4)),
    program("vmap_inside_all_gather", "jax.pmap(jax.vmap(lambda x: lax.all_gather(x,'i',axis=1,tiled=True)),'i')(a0)", num(2, 3, 2, 2)),
]

GRAD = [
    program("params_tree", "jax.pmap(jax.grad(lambda p,x: lax.psum(((x@p['w']+p['b'])**2).sum(),'i')),'i',in_axes=(None,0))({'w':a0,'b':a1},a2)", num(3, 2), num(2), num(4, 2, 3)),
    program("aux", "jax.pmap(jax.value_and_grad(lambda x: (lax.pmean(x**3,'i'),{'x':x}),has_aux=True),'i')(a0)", X4),
    program("argnums_tuple", "jax.pmap(jax.grad(lambda x,w: lax.psum(x*w,'i')*x,argnums=(0,1)),'i')(a0,a1)", X4, W4),
    program("psum_groups", "jax.pmap(jax.grad(lambda x,w: w*lax.psum(x**2,'i',axis_index_groups=[[0,3],[1,2]])),'i')(a0,a1)", X4, W4),
    program("pmean_groups", "jax.pmap(jax.grad(lambda x,w: w*lax.pmean(x**2,'i',axis_index_groups=[[0,2],[1,3]])),'i')(a0,a1)", X4, W4),
    program("psum_positional", "jax.pmap(jax.grad(lambda x,w: w*lax.psum(x**2,('i',0))),'i')(a0,a1)", num(4, 3), W4),
    program("all_gather_tiled", "jax.pmap(jax.grad(lambda x,w: (w*lax.all_gather(x**2,'i',axis=1,tiled=True)).sum()),'i')(a0,a1)", num(2, 3, 2), num(2, 3, 4, start=8)),
    program("all_gather_groups", "jax.pmap(jax.grad(lambda x,w: (w*lax.all_gather(x,'i',axis_index_groups=[[0,2],[3,1]])).sum()),'i')(a0,a1)", X4, num(4, 2)),
    program("psum_scatter_dim1", "jax.pmap(jax.grad(lambda x,w: (w*lax.psum_scatter(x**2,'i',scatter_dimension=1)).sum()),'i')(a0,a1)", num(3, 2, 3), num(3, 2)),
    program("all_to_all_tiled_01", "jax.pmap(jax.grad(lambda x,w: (w*lax.all_to_all(x**2,'i',0,1,tiled=True)).sum()),'i')(a0,a1)", num(2, 4, 3), num(2, 2, 6)),
    program("all_to_all_01", "jax.pmap(jax.grad(lambda x,w: (w*lax.all_to_all(x,'i',0,1)).sum()),'i')(a0,a1)", *(num(4, 4, 2), num(4, 2, 4)), ideal="jax.pmap(lambda w: lax.all_to_all(w,'i',1,0),'i')(a1)"),
    program("ppermute_partial", "jax.pmap(jax.grad(lambda x,w: w*lax.ppermute(x**2,'i',[(0,3),(2,1)])),'i')(a0,a1)", X4, W4),
    program("pshuffle", "jax.pmap(jax.grad(lambda x,w: w*lax.pshuffle(x,'i',[2,0,3,1])),'i')(a0,a1)", X4, W4),
    program("pswapaxes", "jax.pmap(jax.grad(lambda x,w: (w*lax.pswapaxes(x,'i',0)).sum()),'i')(a0,a1)", num(3, 3), num(3, 3, start=9)),
    program("pbroadcast", "jax.pmap(jax.grad(lambda x,w: w*lax.pbroadcast(x**2,'i',1)),'i')(a0,a1)", X4, W4, ideal="np.array([0,2*2*1111.,0,0],np.float32)"),
    program("pmax_ties", "jax.pmap(jax.grad(lambda x,w: w*lax.pmax(x,'i')),'i')(a0,a1)", TIED, W4, ideal="np.array([0,1111/2,0,1111/2],np.float32)"),
    program("pmin", "jax.pmap(jax.grad(lambda x,w: w*lax.pmin(x**2,'i')),'i')(a0,a1)", TIED, W4, ideal="np.array([0,0,2*1111.,0],np.float32)"),
    program("pmax_groups", "jax.pmap(jax.grad(lambda x,w: w*lax.pmax(x,'i',axis_index_groups=[[0,1],[2,3]])),'i')(a0,a1)", TIED, W4, ideal="np.array([0,11,0,1100],np.float32)"),
    program("stop_gradient_of_pmean", "jax.pmap(jax.grad(lambda x: ((x-lax.stop_gradient(lax.pmean(x,'i')))**2).sum()),'i')(a0)", num(4, 3)),
    program("batch_norm", "jax.pmap(jax.grad(lambda x,w: (w*(x-lax.pmean(x.mean(0),'i'))/jnp.sqrt(lax.pmean(((x-lax.pmean(x.mean(0),'i'))**2).mean(0),'i')+0.1)).sum()),'i')(a0,a1)", num(4, 3, 2), num(4, 3, 2, start=8)),
    program("softmax_axis", "jax.pmap(jax.grad(lambda x,w: (w*jax.nn.softmax(x,axis='i')).sum()),'i')(a0,a1)", num(4, 2), num(4, 2, start=7), ideal="jax.pmap(jax.grad(lambda x,w: (w*jnp.exp(x)/lax.psum(jnp.exp(x),'i')).sum()),'i')(a0,a1)"),
    program("jvp_pmean", "jax.pmap(lambda x,t: jax.jvp(lambda x: lax.pmean(jnp.sin(x),'i'),(x,),(t,)),'i')(a0,a1)", X4, W4),
    program("jvp_all_gather", "jax.pmap(lambda x,t: jax.jvp(lambda x: lax.all_gather(x**2,'i'),(x,),(t,)),'i')(a0,a1)", num(3, 2), num(3, 2, start=6)),
    program("jvp_ppermute", "jax.pmap(lambda x,t: jax.jvp(lambda x: x*lax.ppermute(x,'i',[(0,1),(1,2)]),(x,),(t,)),'i')(a0,a1)", X4, W4),
    program("jvp_two_arguments", "jax.pmap(lambda x,y: jax.jvp(lambda x,y: lax.psum(x*y,'i'),(x,y),(y,x)),'i')(a0,a1)", X4, W4),
    program("vjp_tree", "jax.pmap(lambda x,y: jax.vjp(lambda t,y: lax.psum(t['a']*y,'i'),{'a':x},y)[1](y),'i')(a0,a1)", X4, W4),
    program("jacfwd_psum", "jax.pmap(jax.jacfwd(lambda x: lax.psum(x**2,'i')),'i')(a0)", num(3, 2)),
    program("jacrev_psum", "jax.pmap(jax.jacrev(lambda x: lax.psum(x**2,'i')),'i')(a0)", num(3, 2)),
    program("jacfwd_ppermute", "jax.pmap(jax.jacfwd(lambda x: lax.ppermute(x*x[0],'i',[(i,(i+1)%3) for i in range(3)])),'i')(a0)", num(3, 2)),
    program("jacrev_psum_scatter", "jax.pmap(jax.jacrev(lambda x: lax.psum_scatter(x**2,'i')),'i')(a0)", num(2, 2, 2)),
    program("jacrev_all_to_all", "jax.pmap(jax.jacrev(lambda x: lax.all_to_all(x**2,'i',0,0)),'i')(a0)", num(2, 2)),
    program("hessian_psum", "jax.pmap(jax.hessian(lambda x: lax.psum((x**3).sum(),'i')),'i')(a0)", num(3, 2)),
    program("hessian_pmean_square", "jax.pmap(jax.hessian(lambda x: (lax.pmean(x,'i')**2).sum()),'i')(a0)", num(4, 2)),
    program("grad_of_grad_all_gather", "jax.pmap(jax.grad(lambda x: jax.grad(lambda x: (lax.all_gather(x,'i')**3).sum())(x)),'i')(a0)", X4),
    program("hvp", "jax.pmap(lambda x,t: jax.jvp(jax.grad(lambda x: lax.psum((x**2).sum(),'i')**2),(x,),(t,))[1],'i')(a0,a1)", num(3, 2), num(3, 2, start=8)),
    program("grad_of_jvp", "jax.pmap(jax.grad(lambda x: jax.jvp(lambda x: lax.psum(x**3,'i'),(x,),(x,))[1]),'i')(a0)", X4),
    program("vmap_of_grad", "jax.pmap(jax.vmap(jax.grad(lambda x: lax.psum(x**2,'i'))),'i')(a0)", num(4, 3)),
    program("grad_of_vmap", "jax.pmap(jax.grad(lambda x,w: (w*jax.vmap(lambda x: lax.pmean(x**2,'i'))(x)).sum()),'i')(a0,a1)", num(4, 3), num(4, 3, start=7)),
    program("vmap_of_jacrev", "jax.pmap(jax.vmap(jax.jacrev(lambda x: lax.all_gather(x,'i',tiled=True))),'i')(a0)", num(2, 3, 2)),
    program("vmap_of_hessian", "jax.pmap(jax.vmap(jax.hessian(lambda x: lax.psum((x**3).sum(),'i'))),'i')(a0)", num(2, 3, 2)),
    program("through_loop", "jax.pmap(jax.grad(lambda x: lax.fori_loop(0,3,lambda k,y: x*lax.ppermute(y,'i',[(i,(i+1)%4) for i in range(4)]),x)),'i')(a0)", X4),
    program("custom_vjp_residual", "(lambda f: (f.defvjp(lambda x: (lax.psum(x**2,'i'),x), lambda r,ct: (2*r*ct,)), jax.pmap(jax.grad(f),axis_name='i')(a0))[1])(jax.custom_vjp(lambda x: lax.psum(x**2,'i')))", X4),
    program("custom_vjp_identity_forward", "(lambda f: (f.defvjp(lambda x: (x*1,None), lambda r,ct: (lax.psum(ct,'i'),)), jax.pmap(jax.grad(lambda x,w: w*f(x)),axis_name='i')(a0,a1))[1])(jax.custom_vjp(lambda x: x*1))", X4, W4),
    program("checkpoint", "jax.pmap(jax.grad(jax.checkpoint(lambda x: lax.psum(jnp.sin(x)*x,'i'))),'i')(a0)", X4),
    program("bfloat16", "jax.pmap(jax.grad(lambda x: lax.psum(x**2,'i')),'i')(a0)", brain(4)),
    program("sgd_step", "jax.pmap(lambda p,x,y: jax.tree.map(lambda v,g: v-0.1*lax.pmean(g,'i'),p,jax.grad(lambda p: ((jnp.tanh(x@p['w'])+p['b']-y)**2).mean())(p)),'i',in_axes=(None,0,0),out_axes=None)({'w':a0,'b':a1},a2,a3)", num(3, 2), num(2), num(4, 5, 3), num(4, 5, 2)),
    program("unused_argument", "jax.pmap(jax.grad(lambda x,w: lax.psum(w,'i')),'i')(a0,a1)", X4, W4),
    program("integer_constant_mix", "jax.pmap(jax.grad(lambda x: x**2*lax.axis_index('i')+lax.psum(1,'i')*x),'i')(a0)", X4),
]

ERRORS = [
    program("unbound_all_gather", "jax.pmap(lambda x: lax.all_gather(x,'j'),'i')(a0)", num(4)),
    program("unbound_axis_index", "jax.pmap(lambda x: lax.axis_index('j'),'i')(a0)", num(4)),
    program("unbound_without_a_name", "jax.pmap(lambda x: lax.psum(x,'i'))(a0)", num(4)),
    program("unbound_in_tuple", "jax.pmap(lambda x: lax.psum(x,('i','j')),'i')(a0)", num(4)),
    program("repeated_axis", "jax.pmap(lambda x: lax.psum(x,('i','i')),'i')(a0)", num(4)),
    program("groups_repeat", "jax.pmap(lambda x: lax.psum(x,'i',axis_index_groups=[[0,1],[1,2]]),'i')(a0)", num(4), error="ValueError"),
    program("groups_do_not_cover", "jax.pmap(lambda x: lax.psum(x,'i',axis_index_groups=[[0,1]]),'i')(a0)", num(4), error="ValueError", crashes=True),
    program("groups_out_of_range", "jax.pmap(lambda x: lax.all_gather(x,'i',axis_index_groups=[[0,1],[2,7]]),'i')(a0)", num(4), error="ValueError", crashes=True),
    program("groups_with_positional", "jax.pmap(lambda x: lax.psum(x,('i',0),axis_index_groups=[[0,1],[2,3]]),'i')(a0)", num(4, 2)),
    program("ppermute_two_sources", "jax.pmap(lambda x: lax.ppermute(x,'i',[(0,1),(2,1)]),'i')(a0)", num(4)),
    program("ppermute_out_of_range", "jax.pmap(lambda x: lax.ppermute(x,'i',[(0,7)]),'i')(a0)", num(4)),
    program("all_gather_axis_too_big", "jax.pmap(lambda x: lax.all_gather(x,'i',axis=5),'i')(a0)", num(4, 2)),
    program("all_gather_tiled_scalar", "jax.pmap(lambda x: lax.all_gather(x,'i',tiled=True),'i')(a0)", num(4)),
    program("psum_scatter_tiled_indivisible", "jax.pmap(lambda x: lax.psum_scatter(x,'i',tiled=True),'i')(a0)", num(4, 6)),
    program("psum_scatter_scalar", "jax.pmap(lambda x: lax.psum_scatter(x,'i'),'i')(a0)", num(4)),
    program("psum_of_text", "jax.pmap(lambda x: lax.psum('text','i'),'i')(a0)", num(4), error="TypeError"),
    program("in_axes_bool", "jax.pmap(lambda x: x, in_axes=True)(a0)", num(4)),
    program("in_axes_float", "jax.pmap(lambda x: x, in_axes=(0.0,))(a0)", num(4)),
    program("in_axes_text", "jax.pmap(lambda x: x, in_axes='0')(a0)", num(4)),
    program("in_axes_wrong_length", "jax.pmap(lambda x,y: x+y, in_axes=(0,0,0))(a0,a0)", num(4)),
    program("in_axes_wrong_keys", "jax.pmap(lambda t: t['a'], in_axes=({'b':0},))({'a':a0})", num(4)),
    program("in_axes_all_none", "jax.pmap(lambda x: x, in_axes=None)(a0)", num(4)),
    program("out_axes_text", "jax.pmap(lambda x: x, out_axes='0')(a0)", num(4)),
    program("out_axes_too_big", "jax.pmap(lambda x: x, out_axes=2)(a0)", num(4, 2)),
    program("third_positional", "jax.pmap(lambda x: x,'i',0)(a0)", num(4)),
    program("three_sizes", "jax.pmap(lambda x,y,z: x)(a0,a0,a1)", num(4), num(2)),
    program("keyword_size", "jax.pmap(lambda x,y: x)(a0,y=a1)", num(4), num(3)),
    program("axis_of_size_zero", "jax.pmap(lambda x: x)(a0)", num(0, 3), error="ValueError"),
    program("no_devices", "jax.pmap(lambda x: x, devices=[])(a0)", num(4)),
    program("static_missing", "jax.pmap(lambda x,n: x, static_broadcasted_argnums=1)(a0)", num(4)),
    program("static_and_donated", "jax.pmap(lambda x,n: x, static_broadcasted_argnums=0, donate_argnums=0)(a0,1)", num(4)),
    program("text_result", "jax.pmap(lambda x: 'text')(a0)", num(4)),
    program("missing_key", "jax.pmap(lambda t: t['b'])({'a':a0})", num(4)),
    program("division_by_zero", "jax.pmap(lambda x: x*(1//0))(a0)", num(4)),
    program("too_few_arguments", "jax.pmap(lambda x,y: x)(a0)", num(4)),
]

FAMILIES = {
    "pmap_args": ARGS,
    "collectives": COLLECTIVES,
    "grad_inside": GRAD,
    "errors": ERRORS,
}
